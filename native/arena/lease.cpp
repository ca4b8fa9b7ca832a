#include "lease.h"

namespace conveyor {

namespace {

// Where the block lies, if there is one and `reader` can be one of its readers.
char* checked_block(ArenaView& view, uint64_t offset, uint64_t size, uint32_t reader, std::shared_ptr<Mapping>& keep) {
  char* block = view.block(offset, size, keep);
  if (reinterpret_cast<BlockHeader*>(block)->magic != kBlockMagic || reader >= kMaxReaders)
    throw std::system_error(EPROTO, std::generic_category(), "no block header");
  return block;
}

}  // namespace

Lease::Lease(ArenaView& view, uint64_t offset, uint64_t size, uint32_t reader)
    : returns_(view.returns()), offset_(offset), size_(size), block_(checked_block(view, offset, size, reader, mapping_)), reader_(reader),
      generation_(reinterpret_cast<BlockHeader*>(block_)->lease[reader].load(std::memory_order_relaxed) >> 1), hold_(*mapping_) {}

Lease::~Lease() {
  hold_.leave([returns = std::move(returns_), mapping = std::move(mapping_), header = reinterpret_cast<BlockHeader*>(block_), reader = reader_, generation = generation_] {
    header->end(reader, generation, returns.get());
  });
}

}  // namespace conveyor
