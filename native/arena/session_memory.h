// The memory behind all arenas of a session, counted on the process table; and how a process is told to look for
// what it can give back.
#pragma once

#include "../platform.h"

namespace conveyor {

// Of one process: what its thread that gives memory back sleeps on (Arena::run).
struct Returns {
  std::atomic<uint32_t> count;     // futex word; bumped by who has news
  std::atomic<uint32_t> wanted;    // 1: the thread wants to know that a lease on one of its blocks has ended
  std::atomic<uint32_t> requested;     // how often somebody has wanted all that is free to be given back now
  std::atomic<uint32_t> answered;  // it has been given back since it was asked for this often
  std::atomic<uint32_t> keeping;   // published blocks that something is attached to
  std::atomic<uint32_t> kept_news;    // how often some of them may have come back
  std::atomic<uint32_t> kept_wanted;  // 1: the thread wants to be woken for that
  std::atomic<uint32_t> lingering;    // values that are kept for those alone who read them here (hazards.h)

  void wake() {
    count.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(&count);
  }
  // A lease has ended, by its reader's word, its leaving or its death. Dekker with Arena::run: it raises
  // `wanted` and then looks at the leases; who ends one looks at `wanted` afterwards. Nobody but the
  // thread takes `wanted` down, so one that stops half way keeps nobody else from waking it.
  void note() {
    if (wanted.load(std::memory_order_seq_cst) != 0) wake();
  }
  // As note(), of a block that something is attached to: that waits for nobody's quiet moment. Dekker likewise.
  void note_kept() {
    kept_news.fetch_add(1, std::memory_order_seq_cst);
    if (kept_wanted.load(std::memory_order_seq_cst) != 0) wake();
  }
  // As note(), of a reader that is dead, or has left: on which blocks is not known here. Dekker with
  // Arena::publish, which counts the block in `keeping` and then looks whether it is still held; and with
  // Arena::linger likewise.
  void note_any() {
    if (keeping.load(std::memory_order_seq_cst) != 0 || lingering.load(std::memory_order_seq_cst) != 0)
      note_kept();
    else
      note();
  }
  // For pending(). A number for each, so that who asks while an earlier one is being answered has another
  // answer of its own.
  uint32_t ask() {
    const uint32_t ticket = requested.fetch_add(1, std::memory_order_seq_cst) + 1;
    wake();
    return ticket;
  }
  // Not answered yet, by the process that was asked: a later one begins to count again.
  bool pending(uint32_t ticket) const {
    return int32_t(answered.load(std::memory_order_seq_cst) - ticket) < 0 && int32_t(requested.load(std::memory_order_seq_cst) - ticket) >= 0;
  }
};

// Of the whole session.
struct SessionMemory {
  std::atomic<uint64_t> bytes;   // with memory behind them, of all processes
  std::atomic<uint64_t> freed;   // that have been given back, ever
  std::atomic<uint64_t> returned;  // published blocks that have come back while somebody starved
  std::atomic<uint32_t> given;   // futex word: how often a process has given back what it was asked for, or has ended

  void give_back(uint64_t less) {
    bytes.fetch_sub(less, std::memory_order_relaxed);
    freed.fetch_add(less, std::memory_order_relaxed);
  }

  void note_given() {
    given.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(&given);
  }

  // One step, so that of two who ask at the same time only as many pass as there is room for.
  bool take(uint64_t more, uint64_t cap) {
    uint64_t now = bytes.load(std::memory_order_relaxed);
    do {
      if (now > cap || more > cap - now) return false;
    } while (!bytes.compare_exchange_weak(now, now + more, std::memory_order_relaxed));
    return true;
  }
};

}  // namespace conveyor
