// What the bindings share. Each file binds one group of classes; module.cpp puts them together.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "casters.h"
#include "ring.h"

namespace conveyor {

namespace nb = nanobind;
using namespace nb::literals;

void bind_process_table(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_recorder(nb::module_& m);
void bind_channel(nb::module_& m);
void bind_graph(nb::module_& m);
void bind_door(nb::module_& m);
void bind_turn(nb::module_& m);
void bind_will(nb::module_& m);
void bind_collective(nb::module_& m);
void bind_direct(nb::module_& m);
void bind_borrowed(nb::module_& m);
void bind_pins(nb::module_& m);
void bind_net(nb::module_& m);

// What stands for "nothing": a value may be None. Never destroyed: it may be asked for while the interpreter ends.
extern nb::object* empty;

// The time of the monotonic clock at which a timeout in seconds is over; 0: never (None).
uint64_t deadline_after(nb::handle timeout);

// A kind of frame that Python has named; throws ValueError if there is none.
Kind kind_of(uint16_t kind);

}  // namespace conveyor
