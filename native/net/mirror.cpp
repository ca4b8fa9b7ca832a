#include "mirror.h"

#include <algorithm>
#include <set>

namespace conveyor::net {

Mirror::Mirror(uint64_t id, std::shared_ptr<Segment> segment, const std::shared_ptr<ProcessTable>& process_table, const std::vector<RingSpec>& rings,
               const std::vector<LimitsSpec>& limits, uint32_t self, Whereabouts& where)
    : id(id), self_(self), segment_(std::move(segment)) {
  if (rings.size() > kMostRings) throw std::system_error(E2BIG, std::generic_category(), "rings of a segment");
  std::set<uint32_t> hosts;
  std::set<std::pair<uint32_t, uint32_t>> doorbells, members;
  const auto meet = [&](const Target& t) {
    if (t.slot >= process_table->slots() || t.bit >= kDoorbellBits) throw std::system_error(EINVAL, std::generic_category(), "ring of a mirror");
    const uint32_t host = where.host_of(t.slot);
    if (host != self) hosts.insert(host);
    (host == self ? members : doorbells).insert({t.slot, t.bit});
    return host;
  };
  size_t cursors = 0;
  rings_.reserve(rings.size());
  for (const RingSpec& spec : rings) {
    const auto index = uint32_t(rings_.size());
    Entry& entry = rings_.emplace_back(Entry{segment_->ring(spec.offset), spec.writer.slot, meet(spec.writer), {}, cursors});
    if (spec.kept & (spec.kept - 1)) throw std::system_error(EINVAL, std::generic_category(), "times of a mirrored ring");
    if (spec.readers.size() != entry.ring.readers) throw std::system_error(EINVAL, std::generic_category(), "readers of a mirrored ring");
    cursors += spec.readers.size();
    std::map<uint32_t, std::vector<OutRing::Reading>> readings;
    std::bitset<kMaxReaders> here;
    for (uint32_t r = 0; r < spec.readers.size(); ++r) {
      entry.reader_hosts.push_back(meet(spec.readers[r]));
      readings[entry.reader_hosts.back()].push_back({r, spec.readers[r]});
      if (entry.reader_hosts.back() == self) here.set(r);
      if (entry.writer_host != self) told_.emplace_back(index, r);
    }
    if (entry.writer_host != self) {
      if (here.any()) entry.in = std::make_unique<InRing>(segment_, id, index, spec.offset, process_table, spec.readers, here, where.arena_of(spec.writer.slot),
                                                               where.returning(entry.writer_host), where.unclaimed(), spec.times, spec.kept);
      continue;
    }
    for (const auto& [host, of] : readings) {
      if (host == self) continue;
      if (!spec.view) throw std::system_error(EINVAL, std::generic_category(), "a ring that is sent needs the arena of its writer");
      entry.out[host] = std::make_unique<OutRing>(segment_, id, index, spec.offset, process_table, spec.writer, of, spec.view, where.lent(host), where.unclaimed());
    }
  }
  for (size_t lead = 0; lead < rings.size(); ++lead)
    for (const auto& [host, first] : rings_[lead].out) {
      if (!first->leads()) continue;
      for (size_t i = 0; i < rings.size(); ++i)
        if (const auto at = rings_[i].out.find(host); rings[i].writer.slot == rings[lead].writer.slot && at != rings_[i].out.end() && !at->second->leads())
          at->second->go_behind(*first);
    }
  known_.resize(cursors);
  limits_.reserve(limits.size());
  for (const LimitsSpec& spec : limits) limits_.emplace_back(segment_, id, uint32_t(limits_.size()), spec, self);
  hosts_.assign(hosts.begin(), hosts.end());
  for (const auto& [slot, bit] : doorbells) doorbells_.push_back({where.host_of(slot), {slot, bit}});
  for (const auto& [slot, bit] : members) members_.push_back({slot, bit});
  for (const uint32_t host : hosts_) peers_[host].told.resize(cursors);
}

void Mirror::reconnected(uint32_t host) noexcept {
  std::fill(peers_.at(host).told.begin(), peers_.at(host).told.end(), CursorState{});
  peers_.at(host).open = peers_.at(host).heard = false;
  for (MirroredLimits& l : limits_) l.forget(host);
  for (Entry& e : rings_)
    if (const auto at = e.out.find(host); at != e.out.end()) at->second->shut();
}

void Mirror::put_open(uint32_t host, Connection& to) {
  peers_.at(host).open = true;
  std::vector<OpenEntry> entries;
  for (Entry& e : rings_)
    // Who has been told before takes no heed of this, and is owed a word (kHave) all the same.
    if (e.in && e.writer_host == host) entries.push_back({e.in->index, e.ring.readers, e.in->have(), e.in->at()});
  to.put(Prefix{What::kOpen, 0, uint32_t(sizeof(OpenHead) + entries.size() * sizeof(OpenEntry)), id});
  to.put(OpenHead{rings(), uint32_t(entries.size())});
  if (!entries.empty()) to.put(entries.data(), entries.size() * sizeof(OpenEntry));
}

void Mirror::opened(uint32_t host, const OpenHead& head, const char* entries) {
  if (head.rings != rings()) throw Violation("a segment with other rings");
  if (std::exchange(peers_.at(host).heard, true)) return;  // what was sent since is not to be sent again
  // What it was told before may have come to where there was no such segment.
  peers_.at(host).open = false;
  peers_.at(host).has = true;
  peers_.at(host).theirs.reset();
  std::fill(peers_.at(host).told.begin(), peers_.at(host).told.end(), CursorState{});
  for (MirroredLimits& l : limits_) l.forget(host);
  for (uint32_t i = 0; i < head.count; ++i) {
    OpenEntry entry;
    std::memcpy(&entry, entries + i * sizeof entry, sizeof entry);
    if (entry.ring >= rings() || entry.readers != rings_[entry.ring].ring.readers) throw Violation("a segment with other rings");
    const auto found = rings_[entry.ring].out.find(host);
    if (found == rings_[entry.ring].out.end()) throw Violation("a ring that does not lead there");
    found->second->open(entry.have, entry.at);
  }
}

void Mirror::closed(uint32_t host, Haves theirs) {
  peers_.at(host).heard = peers_.at(host).has = false;
  peers_.at(host).theirs = std::move(theirs);
  for (OutRing* ring : out(host)) ring->shut();
}

bool Mirror::owes(uint32_t host, uint32_t writer) const {
  if (!peers_.at(host).has) return false;
  return std::ranges::any_of(rings_, [&](const Entry& e) {
    const auto at = e.out.find(host);
    return e.writer == writer && at != e.out.end() && at->second->owes();
  });
}

Haves Mirror::haves(uint32_t host) const {
  Haves found;
  for (const Entry& e : rings_)
    if (e.in && e.writer_host == host) found.push_back({e.in->index, 0, e.in->have()});
  return found;
}

std::vector<SentClaims> Mirror::forsake(uint32_t host) {
  std::vector<SentClaims> all;
  for (OutRing* ring : out(host)) std::ranges::move(ring->forsake(), std::back_inserter(all));
  return all;
}

CursorState Mirror::state(const Entry& entry, uint32_t reader) const {
  if (entry.reader_hosts[reader] != self_) return known_[entry.first_cursor + reader];
  const ReaderCursor& cursor = entry.ring.cursor(reader);
  // Whether it has left comes first: what it has taken until then is in `next`.
  const uint32_t closed = cursor.closed();
  return {cursor.next.load(std::memory_order_seq_cst), cursor.wanted.load(std::memory_order_acquire), cursor.lost.load(std::memory_order_relaxed), closed};
}

void Mirror::look_at_cursors(uint32_t host) {
  Peer& peer = peers_.at(host);
  credits_.clear();
  for (const auto& [ring, reader] : told_) {
    const Entry& entry = rings_[ring];
    if (entry.reader_hosts[reader] == host || (entry.writer_host != host && hosts_.size() == 1)) continue;
    const CursorState now = state(entry, reader);
    CursorState& told = peer.told[entry.first_cursor + reader];
    if (now == told) continue;
    told = now;
    credits_.push_back({ring, reader, now});
  }
}

void Mirror::tell(uint32_t host, Connection& to) {
  for (Entry& e : rings_)
    if (e.in && e.writer_host == host && e.in->owes_have()) {
      to.put(Prefix{What::kHave, 0, sizeof(Have), id});
      to.put(Have{e.in->index, 0, e.in->have()});
      e.in->note_told();
    }
  // As they were looked at behind the cursors: what has changed since comes the next time. Who says that he takes nothing more, and then lets go of frames, has said it where there is room.
  for (MirroredLimits& l : limits_) l.tell(host, to);
  for (const Credit& credit : credits_) {
    to.put(Prefix{What::kCredit, 0, sizeof(Credit), id});
    to.put(credit);
  }
}

bool Mirror::look_at_limits() {
  bool changed = false;
  for (MirroredLimits& l : limits_) {
    if (!l.changed()) continue;
    l.look();
    changed = true;
  }
  return changed;
}

bool Mirror::ask(uint32_t host) {
  bool due = false;
  for (Entry& e : rings_) {
    if (!e.in || e.writer_host != host || !e.in->asks()) continue;
    uint64_t slowest = e.in->have();
    for (uint32_t r = 0; r < e.ring.readers; ++r)
      if (e.in->waits_for(r)) slowest = std::min(slowest, peers_.at(host).told[e.first_cursor + r].next);
    due |= e.in->ask(slowest);
  }
  return due;
}

void Mirror::hear(uint32_t host, const Credit& credit) {
  if (credit.ring >= rings() || credit.reader >= rings_[credit.ring].ring.readers) throw Violation("a reader that is none");
  Entry& entry = rings_[credit.ring];
  if (entry.reader_hosts[credit.reader] == self_) throw Violation("a reader that is not there");
  CursorState& known = known_[entry.first_cursor + credit.reader];
  known.next = std::max(known.next, credit.state.next);
  known.wanted = std::max(known.wanted, credit.state.wanted);
  if (int32_t(credit.state.lost - known.lost) > 0) known.lost = credit.state.lost;
  known.closed |= credit.state.closed != 0;
  peers_.at(host).told[entry.first_cursor + credit.reader] = credit.state;
  if (const auto out = entry.out.find(entry.reader_hosts[credit.reader]); out != entry.out.end()) out->second->move(credit.reader, known);
}

void Mirror::hear(uint32_t host, const Have& have) {
  if (have.ring >= rings()) throw Violation("a ring that is none");
  const auto out = rings_[have.ring].out.find(host);
  if (out == rings_[have.ring].out.end()) throw Violation("a ring that does not lead there");
  out->second->release(have.have);
}

MirroredLimits& Mirror::limits(uint32_t which) {
  if (which >= limits_.size()) throw Violation("limits that are none");
  return limits_[which];
}

bool Mirror::hear(uint32_t host, const LimitsHead& head, const char* bits) { return limits(head.which).hear(host, head, bits); }

bool Mirror::hear(uint32_t host, const Failures& said) { return limits(said.which).hear(host, said); }

InRing& Mirror::in(uint32_t host, uint32_t ring) {
  if (ring >= rings() || !rings_[ring].in || rings_[ring].writer_host != host) throw Violation("a frame of a ring that does not lead here");
  return *rings_[ring].in;
}

bool Mirror::lends(uint32_t host, uint32_t ring, uint64_t number) const {
  if (ring >= rings()) return false;
  const auto found = rings_[ring].out.find(host);
  return found != rings_[ring].out.end() && found->second->lends(number);
}

std::vector<OutRing*> Mirror::out(uint32_t host) {
  std::vector<OutRing*> found;
  for (const bool lead : {false, true})
    for (Entry& e : rings_)
      if (const auto at = e.out.find(host); at != e.out.end() && at->second->leads() == lead) found.push_back(at->second.get());
  return found;
}

// --- limits ---

MirroredLimits::MirroredLimits(const std::shared_ptr<Segment>& segment, uint64_t id, uint32_t which, const LimitsSpec& spec, uint32_t self)
    : id_(id), which_(which), self_(self), home_(spec.home), limits_(segment, spec.offset, spec.sets, spec.tasks), sets_(spec.sets) {
  if (limits_.bit_words() > kMostBitWords) throw std::system_error(EINVAL, std::generic_category(), "limits");
  for (Set& set : sets_) set.words.bits.resize(limits_.bit_words());
  seen_ = limits_.changes() - 1;  // whatever is there has not been looked at
}

void MirroredLimits::look() {
  seen_ = limits_.changes();  // first: what changes meanwhile is looked at once more
  read();
}

void MirroredLimits::read() {
  for (uint32_t i = 0; i < sets_.size(); ++i) {
    Set& set = sets_[i];
    const uint64_t deadline = set.words.deadline;
    limits_.copy(i, set.words);
    if (set.words.deadline != deadline) ++set.version;
  }
  uint32_t own = limits_.failures();
  for (const auto& [host, count] : failures_)
    if (host != self_) own -= count;
  failures_[self_] = own;
}

MirroredLimits::Told& MirroredLimits::told(uint32_t host) {
  const auto [found, fresh] = told_.try_emplace(host);
  if (fresh) {
    found->second.sets.resize(sets_.size());
    for (Set& set : found->second.sets) set.words.bits.resize(limits_.bit_words());
  }
  return found->second;
}

void MirroredLimits::tell(uint32_t host, Connection& to) {
  Told& known = told(host);
  const uint32_t own = failures_[self_];
  if (own != known.failures) {
    to.put(Prefix{What::kFailures, 0, sizeof(Failures), id_});
    to.put(Failures{which_, own});
    known.failures = own;
  }
  for (uint32_t i = 0; i < sets_.size(); ++i) {
    Set& has = known.sets[i];
    Set next = sets_[i];
    if ((next.words.ended & Limits::kFailed) && self_ != home_ && host != home_) next.words.ended = has.words.ended;
    if (next.version == has.version && next.words == has.words) continue;
    const uint64_t now = now_ns(), deadline = next.words.deadline;
    LimitsHead head = {which_, i, next.version, limits_.bit_words(), 0, next.words.ended, next.words.skipped};
    if (deadline != 0) head.left = deadline > now ? deadline - now : 1;
    to.put(Prefix{What::kLimits, 0, uint32_t(sizeof head + head.words * sizeof(uint64_t)), id_});
    to.put(head);
    if (head.words != 0) to.put(next.words.bits.data(), head.words * sizeof(uint64_t));
    has = std::move(next);
  }
}

bool MirroredLimits::hear(uint32_t host, const LimitsHead& head, const char* bits) {
  if (head.set >= sets_.size() || head.words != limits_.bit_words()) throw Violation("limits of another shape");
  read();
  Set& set = sets_[head.set];
  const Set before = set;
  Limits::Copy said{0, head.ended, head.skipped, std::vector<uint64_t>(head.words)};
  if (head.words != 0) std::memcpy(said.bits.data(), bits, head.words * sizeof(uint64_t));
  const int32_t ahead = int32_t(head.version - set.version);
  if (ahead > 0 && head.left != 0) said.deadline = now_ns() + std::min<uint64_t>(head.left, uint64_t(1) << 62);
  limits_.merge(head.set, said, ahead > 0, ahead >= 0);
  limits_.copy(head.set, set.words);
  if (ahead > 0) set.version = head.version;
  // What it has just said need not be told to it.
  Set& known = told(host).sets[head.set];
  known.version = std::max(known.version, head.version);
  if (known.version == set.version) known.words.deadline = set.words.deadline;
  known.words.ended = std::max(known.words.ended, head.ended);
  known.words.skipped = head.skipped;
  known.words.bits = said.bits;
  return before.version != set.version || before.words != set.words;
}

bool MirroredLimits::hear(uint32_t host, const Failures& said) {
  read();
  const uint32_t more = said.count - failures_[host];
  if (more == 0) return false;
  failures_[host] = said.count;
  limits_.add_failures(more);
  return true;
}

}  // namespace conveyor::net
