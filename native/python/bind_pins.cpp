// Blocks that this process has pinned for a device.
#include "bind.h"
#include "exit.h"
#include "made_in_place.h"
#include "arena/pins.h"

namespace conveyor {
namespace {

// The block that a buffer lies in, if it is in use by its owner: it does not come back to its writer meanwhile.
struct InBlock {
  std::shared_ptr<Mapping> mapping{};
  char* base = nullptr;
  uint32_t use = 0;  // which value it is of those that the block has had
  std::shared_ptr<Returns> returns{};
};

InBlock block_of(const Buffer& b, const std::shared_ptr<ProcessTable>& process_table, uint32_t slot) {
  if (b.lease && !b.lease->inherited()) return {b.lease->shared_mapping(), b.lease->block(), b.lease->generation(), b.lease->returns()};
  if (!b.made || b.made->sent || b.made->inherited()) return {};
  const Block& block = *b.made->block;
  return {block.mapping, block.base, block.generation + 1, {process_table, &process_table->slot(slot)->returns}};
}

}  // namespace

void bind_pins(nb::module_& m) {
  nb::class_<BlockPin>(m, "BlockPin",
      "A mark of this process on a block of an arena: none of the block's memory is given back as long as it is there.")
      .def_prop_ro("address", [](BlockPin& p) { return reinterpret_cast<uintptr_t>(p.address()); }, "Where the block lies in this process.")
      .def_prop_ro("nbytes", &BlockPin::size, "How much of it has memory: whole pages.")
      .def_prop_ro("inherited", &BlockPin::inherited, "Whether this process was forked since.")
      .def("release", &BlockPin::release, "Take the mark away: no device has the memory any more.");

  nb::class_<PinWords>(m, "PinWords", "How a process marks blocks that it pins for a device, and how it hears that memory is short.")
      .def("__init__", [](PinWords* self, std::shared_ptr<ProcessTable> process_table, uint32_t slot) {
             if (slot >= process_table->slots()) throw nb::value_error("no such slot");
             new (self) PinWords(std::move(process_table), slot);
           }, "process_table"_a, "slot"_a)
      .def("hold", &PinWords::hold, "some"_a, "Whether there is anything to ask this process for.")
      .def("wait", [](PinWords& words, double seconds) {
             Unlocked unlocked;
             return words.wait(uint64_t(seconds * 1e9));
           }, "seconds"_a, "Sleep until woken, or for that long (0: no limit). True: somebody waits for :meth:`answer`.")
      .def("answer", &PinWords::answer, "What could be let go of has been.")
      .def("wake", &PinWords::wake, "Have the thread in :meth:`wait` look.")
      .def("block", [](PinWords& words, const Buffer& b) -> nb::object {
             const InBlock found = block_of(b, words.process_table(), words.slot());
             if (found.base == nullptr) return nb::none();
             const size_t backed = reinterpret_cast<const BlockHeader*>(found.base)->backed;
             return nb::make_tuple(reinterpret_cast<uintptr_t>(found.base), backed, found.use);
           }, "buffer"_a, nb::sig("def block(self, buffer: Buffer) -> tuple[int, int, int] | None"), R"(
           Of the block that a buffer lies in: its address, how many bytes of it have memory, and which of the block's
           values it has now. ``None``: it lies in none, or the block has been sent.)")
      .def("mark", [](PinWords& words, const Buffer& b) -> nb::object {
             InBlock found = block_of(b, words.process_table(), words.slot());
             if (found.base == nullptr) return nb::none();
             try {
               return nb::cast(new BlockPin(std::move(found.mapping), found.base, std::move(found.returns), words.process_table(), words.slot()), nb::rv_policy::take_ownership);
             } catch (const std::system_error& error) {  // as many have marked it as can
               if (error.code().value() != ENOSPC) throw;
               return nb::none();
             }
           }, "buffer"_a, nb::sig("def mark(self, buffer: Buffer) -> BlockPin | None"),
           "Mark the block that a buffer lies in. ``None``: there is none, or as many processes have marked it as can.");
}

}  // namespace conveyor
