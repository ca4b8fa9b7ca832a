// The thread that sends calls later (pump_wait.h), with its timer; test_interleavings_pump has it without.
#include <mutex>
#include <thread>
#include <utility>

#include "check.h"
#include "pump_wait.h"

using namespace conveyor;

namespace {

constexpr uint64_t kLink = 7;

struct Pumped {
  std::shared_ptr<ProcessTable> process_table = ProcessTable::create(1);
  Fd event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::unique_ptr<Inbox> inbox;
  std::unique_ptr<PumpWait> wait;
  std::mutex gil;
  bool pending = false;  // with `gil`
  std::atomic<int> sent{0};
  std::thread thread;

  Pumped() {
    process_table->prepare(0, "");
    process_table->set_eventfd(0, event.get(), process_table->slot(0)->incarnation.load());
    inbox = std::make_unique<Inbox>(process_table, 0, event.get(), 1ul);
    wait = std::make_unique<PumpWait>(*inbox);
    wait->open();
    thread = std::thread([this] {
      while (wait->wait()) {
        std::lock_guard lock(gil);
        if (!std::exchange(pending, false)) continue;
        wait->end(kLink);
        sent.fetch_add(1);
      }
    });
  }
  ~Pumped() {
    {
      std::lock_guard lock(gil);
      wait->close();
    }
    thread.join();
  }
  void begin() {
    std::lock_guard lock(gil);
    pending = true;
    wait->begin(kLink);
  }
  // Somebody waits for the call, and sends it.
  void begin_and_wait() {
    std::lock_guard lock(gil);
    wait->begin(kLink);
    wait->attend(kLink);
    wait->end(kLink);
    wait->unattend(kLink);
  }
};

}  // namespace

// However often somebody has waited before: it is only sent somewhat later then.
TEST(a_call_that_nobody_waits_for_is_sent_after_many_that_somebody_has_waited_for) {
  Pumped p;
  for (int i = 1; i <= 5; ++i) {
    for (int j = 0; j < 40; ++j) p.begin_and_wait();
    p.begin();
    CHECK(check::soon([&] { return p.sent.load() == i; }));
  }
}
