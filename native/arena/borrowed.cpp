#include "borrowed.h"

namespace conveyor {

namespace {

char* checked_block(ArenaView& view, uint64_t offset, uint64_t size, std::shared_ptr<Mapping>& keep) {
  char* block = view.block(offset, size, keep);
  if (reinterpret_cast<BlockHeader*>(block)->magic != kBlockMagic) throw std::system_error(EPROTO, std::generic_category(), "no block header");
  return block;
}

}  // namespace

Borrowed::Borrowed(std::shared_ptr<const void> keeps, ArenaView& view, uint64_t offset, uint64_t size)
    : keeps_(std::move(keeps)), block_(checked_block(view, offset, size, mapping_)), hold_(*mapping_) {}

Borrowed::~Borrowed() {
  hold_.leave([keeps = std::move(keeps_), mapping = std::move(mapping_)] {});
}

}  // namespace conveyor
