#include "made_in_place.h"

#include <cstring>

#include "arena/private_pages.h"
#include "exit.h"

namespace conveyor {

namespace {

// Guarded by the GIL.
std::vector<MadeInPlace*>& made_in_place() {
  static auto* all = new std::vector<MadeInPlace*>;
  return *all;
}

Block* allocate_in_place(Arena& arena, size_t bytes, bool may_wait) {
  Block* block;
  {
    Unlocked unlocked;  // the system may have to find the memory
    block = arena.allocate(bytes, {}, false, may_wait);
  }
  try {
    auto& all = made_in_place();
    if (all.size() == all.capacity()) all.reserve(2 * all.size() + 8);
  } catch (...) {
    arena.release(block);
    throw;
  }
  return block;
}

}  // namespace

Hold MadeInPlace::hold_of(Arena& arena, Block* block) {
  try {
    return Hold(*block->mapping);
  } catch (...) {  // the session was shut down meanwhile
    arena.release(block);
    throw;
  }
}

MadeInPlace::MadeInPlace(std::shared_ptr<Arena> owner, size_t bytes, bool may_wait)
    : arena(std::move(owner)), block(allocate_in_place(*arena, bytes, may_wait)), length(bytes), mapping_(block->mapping), hold_(hold_of(*arena, block)) {
  made_in_place().push_back(this);  // there is room
}

MadeInPlace::~MadeInPlace() {
  std::erase(made_in_place(), this);
  if (hold_.inherited()) return;
  hold_.leave([arena = arena, block = block, sent = sent, mapping = std::move(mapping_)] {
    if (!sent) arena->release(block);
  });
}

bool MadeInPlace::any() { return !made_in_place().empty(); }

std::shared_ptr<MadeInPlace> MadeInPlace::find(const char* data, size_t size, const Arena* arena) {
  for (MadeInPlace* made : made_in_place())
    // An earlier session's arena is another file: what lies there is copied.
    if (made->arena.get() == arena && !made->sent && !made->hold_.inherited() && data >= made->block->data() && data + size <= made->block->data() + made->length)
      // What a forked child may read stays as it is: a copy is sent.
      return made->hold_.pinned() ? nullptr : made->shared_from_this();
  return nullptr;
}

std::pair<char*, std::shared_ptr<void>> Unshared::own(const char* data) {
  if (!owner_ && mapping_ && size_ >= PrivatePages::kFrom) {
    auto pages = std::make_shared<PrivatePages>(keep_, mapping_, from_, size_);
    // Null: no mapping or no addresses are left; a copy may still fit.
    if (pages->data() != nullptr) to_ = pages->data(), owner_ = std::move(pages);
  }
  if (!owner_) {
    const std::shared_ptr<void> keep = keep_;
    auto copy = unlocked_from(size_, [&] {
      auto memory = std::make_shared<OwnedMemory>(size_);
      std::memcpy(memory->data, from_, size_);
      return memory;
    });
    if (!owner_) to_ = copy->data, owner_ = std::move(copy);  // or another thread was first
  }
  keep_.reset();
  mapping_.reset();
  return {to_ + (data - from_), owner_};
}

void Buffer::unshare() {
  if (!unshared) return;
  const std::shared_ptr<Unshared> memory = unshared;
  auto [at, keeper] = memory->own(data);
  data = at;
  owner = std::move(keeper);
  lease.reset();
  unshared.reset();
}

}  // namespace conveyor
