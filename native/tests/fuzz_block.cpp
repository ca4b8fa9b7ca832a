// Any place and size that a slot's header may claim, over any content of an arena: ArenaView::block and
// Lease refuse it, or all of it can be read, and ending the lease writes its own word at most.
#include <set>
#include <vector>

#include "arena/arena.h"
#include "fuzz_input.h"

using namespace conveyor;

namespace {

// Sparse: two windows and a piece of a third, room for blocks that share a window and blocks alone.
const size_t kFile = 2 * kWindow + 5 * kGranule;

struct File {
  Fd fd = Arena::create_file(kFile);
  char* base = map_shared(fd.get(), 0, kFile);
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static File file;
  fuzz::Input input(data, size);
  const uint8_t flags = input.take<uint8_t>();
  // Arenas whose size is no multiple of a window or a page, too.
  const size_t arena = flags & 1 ? kFile - input.take<uint16_t>() : kFile;
  const auto view = std::make_shared<ArenaView>(file.fd.get(), arena);

  std::vector<size_t> dirty;  // pages to clean behind us
  std::set<uint64_t> alone;
  std::vector<std::unique_ptr<Lease>> held;
  for (int round = 0; round < 16 && input.left() != 0; ++round) {
    struct {
      uint64_t offset, size;
      uint32_t reader;
      uint32_t lease;
      uint32_t magic;
    } claim{};
    const uint8_t how = input.take<uint8_t>();
    // Either any numbers at all, or pages near the places where something ends.
    if (how & 1) {
      claim.offset = input.take<uint64_t>();
      claim.size = input.take<uint64_t>();
    } else {
      static const uint64_t kEnds[] = {0, kWindow, 2 * kWindow, kFile};
      claim.offset = kEnds[how >> 1 & 3] + uint64_t(int64_t(input.take<int8_t>())) * kGranule;
      claim.size = (how & 16 ? kBigBlock : 0) + uint64_t(int64_t(input.take<int16_t>())) * (how & 32 ? 64 : 1);
    }
    claim.reader = how & 64 ? input.take<uint32_t>() : input.take<uint8_t>();
    claim.lease = input.take<uint32_t>();
    claim.magic = how & 128 ? input.take<uint32_t>() : kBlockMagic;
    // Honest writers keep a block's size for ever. The view keeps one mapping for each place, so one
    // more for every larger size would be left behind, and 65530 mappings end the fuzzing.
    if (claim.size >= kBigBlock && !alone.insert(claim.offset).second) continue;
    if (claim.offset <= kFile - kGranule) {
      auto* header = reinterpret_cast<BlockHeader*>(file.base + claim.offset / 8 * 8);
      header->magic = claim.magic;
      if (claim.reader < kMaxReaders) header->lease[claim.reader].store(claim.lease);
      dirty.push_back(claim.offset / kGranule);
    }
    try {
      auto lease = std::make_unique<Lease>(*view, claim.offset, claim.size, claim.reader);
      FUZZ_CHECK(claim.size >= kBlockHeader && claim.size <= arena && claim.offset <= arena - claim.size);
      FUZZ_CHECK(lease->capacity() == claim.size - kBlockHeader);
      fuzz::touch(lease->data() - kBlockHeader, claim.size);
      // It is that place of the file, not another one.
      FUZZ_CHECK(std::memcmp(lease->data() - kBlockHeader, file.base + claim.offset, sizeof(uint32_t)) == 0);
      held.push_back(std::move(lease));
    } catch (const std::system_error&) {
    }
    if (how & 8 && !held.empty()) held.erase(held.begin());
  }
  held.clear();
  FUZZ_CHECK(live_leases() == 0);
  for (size_t page : dirty) std::memset(file.base + page * kGranule, 0, std::min(2 * kGranule, kFile - page * kGranule));
  return 0;
}
