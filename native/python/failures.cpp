#include "failures.h"

#include <algorithm>
#include <string_view>

#include "hooks.h"

namespace conveyor {

namespace {

struct Report {
  uint64_t order;
  bool follows = false;
  std::string_view error;
};
constexpr uint64_t kFollows = uint64_t(1) << 63;  // graph/failures.py

// What a frame tells: when it happened among the failures of the graph, and the encoded error.
Report report_of(const Frame& frame) {
  const std::string_view body(frame.body, frame.size);
  Report report{UINT64_MAX, false, body};  // where there was no memory to tell more
  if (body.size() < sizeof report.order || body == kUnsaidMeta) return report;
  std::memcpy(&report.order, body.data(), sizeof report.order);
  report.follows = (report.order & kFollows) != 0;
  report.error.remove_prefix(sizeof report.order);
  return report;
}

}  // namespace

Failures::Failures(nb::object readers, Limits& limits, bool together)
    : together(together), opened_(std::move(readers)), limits_(limits) {
  for (nb::handle reader : opened_) readers_.push_back(nb::cast<Reader*>(reader));
}

void Failures::leave() {
  for (Reader* reader : readers_) reader->close();
}

void Failures::receive() {
  for (Reader* reader : readers_)
    while (!reader->ring.empty()) {
      told_.emplace_back();
      try {
        told_.back().frame = reader->take();
      } catch (...) {
        told_.pop_back();
        throw;
      }
      ++heard_;
      const Report report = report_of(told_.back().frame);
      told_.back().order = report.order;
      told_.back().follows = report.follows;
    }
  // What was found together is told in the order in which it happened, and what follows from it behind.
  std::sort(told_.begin(), told_.end(), [](const Told& a, const Told& b) { return a.order < b.order; });
}

// The execution, if this is the first that is told of it.
Failures::Failed* Failures::enter(const Told& told, size_t results) {
  const std::string_view error = report_of(told.frame).error;
  auto found = failed_.find(told.frame.tag);
  if (found != failed_.end()) {
    found->second.errors->emplace_back(error);
    return nullptr;
  }
  Failed failed{std::make_shared<std::vector<std::string>>(), std::vector<bool>(results)};
  failed.errors->emplace_back(error);
  return &failed_.emplace(told.frame.tag, std::move(failed)).first->second;
}

bool Failures::has(uint64_t number, size_t reader) const {
  auto found = failed_.find(number);
  return found != failed_.end() && found->second.open[reader];
}

bool Failures::close(uint64_t number, size_t reader) {
  auto found = failed_.find(number);
  if (found == failed_.end() || !found->second.open[reader]) return false;
  found->second.open[reader] = false;
  --found->second.left;
  return true;
}

nb::object Failures::take(uint64_t number, size_t reader) {
  if (!has(number, reader)) return nb::object();
  const auto errors = failed_.find(number)->second.errors;
  nb::object frame = nb::cast(ErrorFrame{nb::bytes(errors->front().data(), errors->front().size()), errors}, nb::rv_policy::move);
  // Making it may have run any code.
  return close(number, reader) ? frame : nb::object();
}

void Failures::forget(uint64_t completed) {
  for (auto it = failed_.begin(); it != failed_.end() && it->first < completed;)
    it = it->second.left == 0 ? failed_.erase(it) : std::next(it);
}

nb::list Failures::told(uint64_t first) const {
  // Copied first: making lists may run any code.
  std::map<uint64_t, std::vector<std::string>> found;
  for (auto it = failed_.lower_bound(first); it != failed_.end(); ++it) found.emplace(it->first, *it->second.errors);
  for (const Told& waits : told_)
    if (waits.frame.tag >= first) found[waits.frame.tag].emplace_back(report_of(waits.frame).error);
  nb::list told;
  for (auto& [number, errors] : found) {
    nb::list metas;
    for (auto& error : errors) metas.append(nb::bytes(error.data(), error.size()));
    told.append(nb::make_tuple(number, metas));
  }
  return told;
}

// The window's side

void InFlightWindow::set_failures(nb::object readers, bool together, const std::vector<size_t>& siblings) {
  failures_ = std::make_shared<Failures>(std::move(readers), *limits_, together);
  is_sibling_.assign(readers_.size(), false);
  if (!together || siblings.size() < 2) return;
  siblings_ = siblings;
  for (const size_t i : siblings) is_sibling_.at(i) = true;
}

// Whether it is not known yet if another result of the execution has failed. Whoever has seen all of them has all
// that is told of it to read, and reads it here.
bool InFlightWindow::awaits_siblings(uint64_t number, size_t i) {
  if (siblings_.empty() || !is_sibling_[i]) return false;
  if (number - first_ >= all_came_) {  // each result asks, and there may be thousands
    uint64_t came = UINT64_MAX;
    for (const size_t j : siblings_) {
      const RingReader& ring = readers_[j]->ring;
      came = std::min(came, std::max(ring.next(), ring.head()));  // a broken one is everybody's error
    }
    all_came_ = came;
  }
  const bool all = number - first_ < all_came_;
  hear();
  return !all && !failures_->has(number, i);
}

bool InFlightWindow::hear_news() {
  if (fork_ != fork_generation.load(std::memory_order_relaxed)) return false;
  const uint64_t over = completed();  // before: all that was told of those is found now
  const bool heard = failures_->news() && failures_->hear(readers_.size(), over, [this](uint64_t number, std::vector<bool>& open) { note_open(number, open); });
  failures_->forget(over);
  return heard;
}

// Whether that is an error of an execution whose first failure is on its way: until it is here, this is not either.
bool InFlightWindow::too_early(uint64_t number, Kind kind) const {
  return kind == Kind::kError && failures_ && failures_->awaits_news(number, completed());
}

void InFlightWindow::hear_before_submission() {
  // What is forgotten costs later gets nothing.
  if (failures_ && (failures_->news() || !failures_->empty())) hear_news();
}

// What is there can still be got, unless it is an error, or one of several results that fail as one: then the first
// error counts here too. Cannot fail, also where a ring breaks just now: half of it noted would be noted again.
void InFlightWindow::note_open(uint64_t number, std::vector<bool>& open) noexcept {
  if (!failures_->together || number < first_ || number >= next_) return;
  for (size_t i = 0; i < readers_.size(); ++i) {
    if (dropped_[i].contains(number)) continue;  // nobody wants it
    // Results come in the order of their numbers.
    const RingReader& ring = readers_[i]->ring;
    const bool published = ring.has_come(number - first_);
    if (published && first_ + ring.next() > number) {
      auto found = stashes_[i].find(number);
      if (found == stashes_[i].end()) continue;
      if (found->second.kind == Kind::kError) stashes_[i].erase(found);  // an error defines nothing that somebody must hear of
      else if (!is_sibling_[i]) continue;
    } else if (published && !is_sibling_[i] && ring.kind_of(number - first_) != Kind::kError) {
      continue;
    } else {
      note_dropped(number, i);
    }
    open[i] = true;
  }
}

bool InFlightWindow::failed(uint64_t number, size_t i) {
  if (!ready(number, i)) return false;
  auto handed = handed_.find({number, i});
  if (handed != handed_.end()) return nb::isinstance<ErrorFrame>(handed->second);
  if (failures_ && failures_->has(number, i)) return true;
  auto stashed = stashes_[i].find(number);
  if (stashed != stashes_[i].end()) return stashed->second.kind == Kind::kError;
  const RingReader& ring = readers_[i]->ring;
  return ring.kind_of(ring.next()) == Kind::kError;  // it is in front
}

nb::list InFlightWindow::failures() {
  if (!failures_) return nb::list();
  hear();
  return failures_->told(completed());
}

}  // namespace conveyor
