// The reading end of a ring for those of its readers that are on one other host: each frame is sent there once.
//
// A reader's cursor moves here when its host says that it has taken the frame. Until then the frame stays in the ring,
// so after a reconnect it is sent again from there, if it has not arrived; nothing else keeps frames. A block is not
// needed for so long: its leases end when the host has it, but those of a frame that keeps something, which are lent.
//
// What a writer has put into a ring where it waits for room (a generator's items) goes ahead of what it puts into others
// of the segment behind that (the generator's end): a reader that has the one counts on having the other. All else of two
// rings comes in any order, since they take turns.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "../arena/view.h"
#include "../ring.h"
#include "claims.h"
#include "connection.h"
#include "lent.h"
#include "wire.h"

namespace conveyor::net {

class OutRing {
 public:
  struct Reading {
    uint32_t reader;  // of the ring
    Target target;    // that it has here: its proxy
  };
  // `view`: of the writer's arena. `lent`: to that host. `unclaimed` is told of claims in frames that are not sent.
  OutRing(const std::shared_ptr<Segment>& segment, uint64_t id, uint32_t index, size_t offset, const std::shared_ptr<ProcessTable>& process_table,
          Target writer, const std::vector<Reading>& readers, std::shared_ptr<ArenaView> view, std::shared_ptr<Lent> lent, Unclaimed unclaimed);
  // Nobody takes for these readers any more what was not sent: no block waits for it.
  ~OutRing();
  OutRing(const OutRing&) = delete;
  OutRing& operator=(const OutRing&) = delete;

  // Its host, which is connected anew, wants frames from `have` on, of whose block it has `at` bytes: any that was ever
  // sent. All else that it says is checked against what it was sent since. Throws Violation if that cannot be.
  void open(uint64_t have, uint64_t at);
  void shut() { open_ = false; }
  // Whether its frames go ahead of others of its writer.
  bool leads() const { return ends_.front().ring.flags & kWriterMayWait; }
  void go_behind(OutRing& lead) { leads_.push_back(&lead); }
  // The number of frames that its host is to have, sent or not; 0 where nobody there wants any.
  uint64_t due() noexcept {
    const uint64_t upto = limit();
    return wanted_ ? upto : 0;
  }
  // See which frames there are. Of a mirror's those that lead come last.
  void look() noexcept;
  // Whether there is something to be sent, and whether something of another ring has to be sent before.
  bool pending() const { return open_ && (begun_ || (sent_ < next_.upto && wanted_)); }
  bool held() noexcept;
  // Whether its host has not been sent all there was at the last look(); while that host has not opened it again, all
  // that it has not said it has.
  bool owes() const { return wanted_ && (open_ ? pending() : have_ < next_.upto); }
  // Put the next frame, or the next piece of its block, which must be there; the bytes it takes.
  size_t step(Connection& to);
  // Its host has all frames below `have`. Throws Violation.
  void release(uint64_t have);
  // Nobody sends any more. What was sent, as far as it claims something and may not have come.
  std::vector<SentClaims> forsake();
  // Whether that frame, which keeps something, was sent as a whole, and its host has not said yet that it is there.
  bool lends(uint64_t number) const {
    return number < sent_ && std::ranges::any_of(loaded_, [&](const Loaded& l) { return l.head.number == number && (l.head.flags & kKeeps); });
  }
  // What its host says of a reader's cursor; may be called with the same more than once. Throws Violation.
  void move(uint32_t reader, const CursorState& state);

  const uint32_t index;  // in its segment
  uint64_t frames = 0;   // sent, again or for the first time
  bool queued = false;   // of who sends: it waits for its turn

 private:
  struct End {
    uint32_t reader;
    Ring ring;
    std::unique_ptr<RingReader> end;
    uint32_t slot;
    uint32_t incarnation;
    bool left = false;  // or dead
  };
  // A frame whose block is being sent, or may have to be sent again.
  struct Loaded {
    FrameHead head;
    std::vector<std::shared_ptr<Lease>> leases;
    const char* block;
  };
  // Frames up to this may be sent when each ring that leads has sent its own up to that.
  struct Stretch {
    uint64_t upto = 0;
    std::vector<uint64_t> behind;
  };
  // Acquire: what was written before the frames up to this is seen.
  uint64_t limit() noexcept;
  void begin(Connection& to);
  // Sets `loaded` for a frame with a block. False: the frame cannot be sent.
  bool load(const SlotHeader& slot, FrameHead& head, const char* body);
  void leave(End& end);
  // Its host has that frame: its leases end, or are lent.
  void hand_over(Loaded& loaded);
  // A frame that nobody has sent yet is not sent to that reader: its block is not needed, nor what it claims.
  void pass_over(const SlotHeader& slot, const char* body, const End& end);
  // The reader does not say any more whether that frame has come, of which a part was sent, or all.
  void note_sent(uint64_t number, const SlotHeader& slot, const char* body, const Loaded* loaded, const End& end);
  // The header of a frame whose body lies in its slot, or with its buffers beside it.
  std::optional<std::string> header_in_slot(const SlotHeader& slot, const char* body, const End& end) const;

  const std::shared_ptr<Segment> segment_;
  const std::shared_ptr<ProcessTable> process_table_;
  const uint64_t id_;
  const std::shared_ptr<ArenaView> view_;
  const std::shared_ptr<Lent> lent_;
  const Unclaimed unclaimed_;
  std::vector<End> ends_;
  std::vector<OutRing*> leads_;
  // What is sent now, and what was found since, which takes its place: others that never pause hold up neither.
  Stretch now_, next_;
  std::deque<Loaded> loaded_;  // by number
  std::vector<SentClaims> sent_claims_;  // for readers that have left since
  uint64_t sent_ = 0;          // the next frame to be sent, or the one that is being sent
  uint64_t most_ = 0;          // frames below this were sent once
  uint64_t have_ = 0;          // its host has those below
  uint64_t at_ = 0;            // bytes of its block that are on their way
  bool begun_ = false, open_ = false;
  bool wanted_ = true;         // some reader has not left
};

}  // namespace conveyor::net
