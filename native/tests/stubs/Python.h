// What python/waiting.cpp needs of Python, for test_interleavings_*: no signals, and no lock that would hide a
// schedule.
#pragma once

namespace model {
unsigned long thread_ident();
}

inline int PyErr_CheckSignals() { return 0; }
inline unsigned long PyThread_get_thread_ident() { return model::thread_ident(); }
