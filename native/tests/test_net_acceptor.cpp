// Who is let in by the thread that accepts connections of other hosts.
#include <arpa/inet.h>
#include <poll.h>
#include <sys/resource.h>

#include <thread>

#include "net/acceptor.h"
#include "net/sha256.h"
#include "net_setup.h"

using namespace conveyor;
using namespace conveyor::net;

namespace {

constexpr char kToken[] = "the token of this session, of 32";

std::string admission(const std::string& token) {
  const std::string said = kAdmissionMagic + std::string(kNonceBytes, 'n');
  return said + std::string(view(hmac_sha256(token, std::string("conveyor admission\0", 19) + said)));
}

// Who says it is: the bytes up to the nonce are those of `kOwn` but for the host's number, the purpose and `version`.
std::string identity(uint8_t host, uint8_t purpose = 0, const std::string& version = "1.2.3") {
  std::string text = kAdmissionMagic + std::string("\0\4\0\7\0\0\0", 7) + char(host) + std::string("\3\13\0", 3) + char(purpose) + std::string(4, '\0') + version;
  text.resize(kIdentityBytes - kNonceBytes);
  return text + std::string(kNonceBytes, 'n');
}

std::string proof(const std::string& token, const std::string& role, const std::string& said) {
  return std::string(view(hmac_sha256(token, std::string("conveyor handshake\0", 19) + role + '\0' + said)));
}

std::string hex(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

struct Listening {
  sockaddr_in at = {};
  std::unique_ptr<Acceptor> acceptor;

  explicit Listening(AcceptorLimits limits = {}, bool tls = true) {
    Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&at), size) != 0 || ::listen(listener.get(), 512) != 0 ||
        ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size) != 0)
      throw_errno("listen");
    acceptor = std::make_unique<Acceptor>(std::move(listener), kToken, identity(0), tls, limits);
  }

  Fd connect(uint32_t last_byte = 1) const {
    Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in from = {};
    from.sin_family = AF_INET;
    from.sin_addr.s_addr = htonl(0x7f000000u + last_byte);
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&from), sizeof from) != 0 || ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at) != 0)
      throw_errno("connect");
    return fd;
  }

  std::vector<Arrival> taken() const {
    pollfd one = {acceptor->ready_fd(), POLLIN, 0};
    while (::poll(&one, 1, -1) < 0) {
    }
    return acceptor->take();
  }
};

void say(const Fd& fd, const std::string& text) { CHECK_EQ(::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL), ssize_t(text.size())); }

// What comes until the other side ends the connection.
std::string heard(const Fd& fd) {
  std::string all;
  char some[64];
  for (;;) {
    const ssize_t n = ::recv(fd.get(), some, sizeof some, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return all;
    all.append(some, size_t(n));
  }
}

std::string answer_of(const Fd& fd, size_t size) {
  std::string all(size, ' ');
  CHECK_EQ(::recv(fd.get(), all.data(), size, MSG_WAITALL), ssize_t(size));
  return all;
}

char answer(const Fd& fd) {
  char one = 9;
  CHECK_EQ(::recv(fd.get(), &one, 1, 0), ssize_t(1));
  return one;
}

}  // namespace

TEST(digests_are_those_of_the_standards) {
  Sha256 empty, abc, long_one;
  CHECK_EQ(hex(empty.digest()), std::string("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
  abc.add("abc");
  CHECK_EQ(hex(abc.digest()), std::string("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
  long_one.add("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq");
  CHECK_EQ(hex(long_one.digest()), std::string("248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
  CHECK_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")), std::string("5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"));
  CHECK_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
           std::string("60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"));
}
TEST(who_knows_the_token_is_handed_over) {
  Listening l;
  const Fd fd = l.connect();
  const std::string said = admission(kToken);
  for (const char c : said) say(fd, std::string(1, c));  // in whatever pieces it comes
  CHECK_EQ(answer(fd), kAdmitted);
  const std::vector<Arrival> taken = l.taken();
  REQUIRE(taken.size() == 1);
  CHECK(taken[0].identity.empty());
  say(fd, "what follows is not read by it");
  char some[64];
  CHECK_EQ(::recv(taken[0].fd.get(), some, sizeof some, 0), ssize_t(30));
  CHECK_EQ(l.acceptor->counts().strangers, 0u);
}
TEST(who_does_not_is_told_so_and_dropped) {
  Listening l;
  const Fd other = l.connect(), garbage = l.connect(), prefix = l.connect(), gone = l.connect();
  say(other, admission("another token"));
  CHECK_EQ(heard(other), std::string(1, kNotAdmitted));
  say(garbage, "GET / HTTP/1.1\r\n\r\n" + std::string(100, ' '));
  CHECK_EQ(heard(garbage), std::string());
  std::string almost = admission(kToken);
  almost.back() ^= 1;
  say(prefix, almost);
  CHECK_EQ(heard(prefix), std::string(1, kNotAdmitted));
  say(gone, "conv");
  ::shutdown(gone.get(), SHUT_WR);
  CHECK_EQ(heard(gone), std::string());
  CHECK_EQ(l.acceptor->counts().strangers, 4u);
  CHECK_EQ(l.acceptor->reasons().size(), 4u);
  CHECK(l.acceptor->take().empty());
}
TEST(who_says_nothing_has_a_limit) {
  Listening l({.patience_ns = 20'000'000});
  const Fd fd = l.connect();
  say(fd, "conv");
  CHECK_EQ(heard(fd), std::string());
  CHECK_EQ(l.acceptor->counts().strangers, 1u);
}
TEST(an_address_beyond_its_rate_has_less_time_and_nobody_else) {
  Listening l({.patience_ns = 600 * kSecond, .hurried_ns = 1'000'000, .rate = 1e-6, .burst = 2});
  std::vector<Fd> silent;
  for (int i = 0; i < 6; ++i) silent.push_back(l.connect(2));
  for (int i = 2; i < 6; ++i) CHECK_EQ(heard(silent[size_t(i)]), std::string());
  CHECK_EQ(l.acceptor->counts().strangers, 4u);
  const Fd other = l.connect(3), same_address = l.connect(2);
  say(other, admission(kToken));
  CHECK_EQ(answer(other), kAdmitted);
}
TEST(a_flood_pushes_out_its_own) {
  Listening l({.patience_ns = 600 * kSecond, .most_pending = 8});
  const Fd slow = l.connect(3);
  const std::string said = admission(kToken);
  say(slow, said.substr(0, 10));
  std::vector<Fd> flood;
  for (int i = 0; i < 100; ++i) flood.push_back(l.connect(2));
  CHECK_EQ(heard(flood[0]), std::string());
  say(slow, said.substr(10));
  CHECK_EQ(answer(slow), kAdmitted);
  for (int i = 0; i < 20; ++i) {  // also from the flood's own address
    const Fd one = l.connect(2);
    say(one, admission(kToken));
    CHECK_EQ(answer(one), kAdmitted);
  }
}
TEST(nobody_is_kept_that_is_not_taken) {
  Listening l({.most_ready = 2});
  std::vector<Fd> all;
  for (int i = 0; i < 3; ++i) {
    all.push_back(l.connect());
    say(all.back(), admission(kToken));
    if (i < 2) CHECK_EQ(answer(all.back()), kAdmitted);
  }
  CHECK_EQ(heard(all[2]), std::string());
  CHECK_EQ(l.acceptor->counts().dropped, 1u);
  l.acceptor->stop();
  CHECK_EQ(heard(all[0]), std::string());
}
namespace {

// The part of the side that dials, until its proof is due: both identities.
std::string introduced(const Fd& fd, const std::string& who, bool admitted = false) {
  if (!admitted) {
    say(fd, admission(kToken));
    CHECK_EQ(answer(fd), kAdmitted);
  }
  for (const char c : who) say(fd, std::string(1, c));  // in whatever pieces it comes
  return who + answer_of(fd, kIdentityBytes);
}

}  // namespace

TEST(without_tls_it_does_the_whole_handshake) {
  Listening l({}, false);
  const Fd fd = l.connect();
  const std::string who = identity(1, 2), said = introduced(fd, who);
  CHECK_EQ(said.substr(kIdentityBytes, kIdentityBytes - kNonceBytes), identity(0).substr(0, kIdentityBytes - kNonceBytes));
  say(fd, proof(kToken, "dials", said) + "what follows is not read by it");
  CHECK(answer_of(fd, 33) == proof(kToken, "listens", said + '\1') + '\1');
  const std::vector<Arrival> taken = l.taken();
  REQUIRE(taken.size() == 1);
  CHECK(taken[0].identity == who);
  CHECK(taken[0].verdict == Verdict::kFine);
  CHECK_EQ(answer_of(taken[0].fd, 30), std::string("what follows is not read by it"));
  CHECK_EQ(l.acceptor->counts().let_in, 1u);
  CHECK_EQ(l.acceptor->counts().strangers, 0u);
  const Fd another = l.connect();
  CHECK(introduced(another, who).substr(kIdentityBytes) != said.substr(kIdentityBytes));  // a nonce is used once
}
TEST(a_proof_is_good_for_its_token_its_role_and_its_connection_alone) {
  Listening l({}, false);
  const std::string who = identity(1);
  const Fd first = l.connect();
  const std::string overheard = proof(kToken, "dials", introduced(first, who));
  say(first, overheard);
  CHECK_EQ(answer_of(first, 33).size(), 33u);
  for (int kind = 0; kind < 5; ++kind) {
    const Fd fd = l.connect();
    const std::string said = introduced(fd, who), right = proof(kToken, "dials", said);
    std::string almost = right;
    almost[31] = char(almost[31] ^ 1);
    say(fd, std::array{overheard, proof("another token", "dials", said), proof(kToken, "listens", said), proof(kToken, "dials over TLS", said), almost}[size_t(kind)]);
    CHECK_EQ(heard(fd), std::string());
  }
  CHECK_EQ(l.acceptor->counts().strangers, 5u);
  CHECK_EQ(l.acceptor->counts().let_in, 1u);
}
TEST(who_proves_itself_and_does_not_fit_is_told_why) {
  Listening l({}, false);
  std::string wire = identity(1), python = identity(1), protocol = identity(1);
  protocol[9] = 5;
  wire[11] = 8;
  python[17] = 12;
  const std::vector<std::pair<std::string, Verdict>> all = {
      {identity(1, 0, "1.2.4"), Verdict::kOtherVersion}, {wire, Verdict::kOtherVersion},    {python, Verdict::kOtherVersion},
      {protocol, Verdict::kOtherVersion},                {identity(0), Verdict::kNotWanted}, {identity(1, 9), Verdict::kFine}};
  for (const auto& [who, verdict] : all) {
    const Fd fd = l.connect();
    const std::string said = introduced(fd, who);
    say(fd, proof(kToken, "dials", said));
    CHECK(answer_of(fd, 33) == proof(kToken, "listens", said + char(verdict)) + char(verdict));
    const std::vector<Arrival> taken = l.taken();
    REQUIRE(taken.size() == 1);
    CHECK(taken[0].verdict == verdict);
    CHECK(taken[0].identity == who);
  }
  CHECK_EQ(l.acceptor->counts().let_in, 1u);
}
TEST(handshakes_that_go_on_are_bounded_and_end) {
  Listening l({.patience_ns = 600 * kSecond, .most_admitted = 4}, false);
  std::vector<Fd> silent;
  for (int i = 0; i < 10; ++i) {
    silent.push_back(l.connect(2));
    say(silent.back(), admission(kToken));  // overheard, say
    CHECK_EQ(answer(silent.back()), kAdmitted);
  }
  for (size_t i = 0; i < 6; ++i) CHECK_EQ(heard(silent[i]), std::string());
  const Fd fd = l.connect(3);
  const std::string said = introduced(fd, identity(1));
  for (int i = 0; i < 10; ++i) {  // they push out their own
    silent.push_back(l.connect(2));
    say(silent.back(), admission(kToken));
    CHECK_EQ(answer(silent.back()), kAdmitted);
  }
  say(fd, proof(kToken, "dials", said));
  CHECK_EQ(answer_of(fd, 33).back(), '\1');
  Listening hurried({.patience_ns = 20'000'000}, false);
  const Fd slow = hurried.connect();
  say(slow, admission(kToken));
  CHECK_EQ(heard(slow), std::string(1, kAdmitted));
  CHECK_EQ(hurried.acceptor->counts().strangers, 1u);
}
TEST(of_addresses_that_have_as_many_the_one_that_came_first_goes) {
  Listening l({.patience_ns = 600 * kSecond, .most_admitted = 3}, false);
  std::vector<Fd> all;
  for (const uint32_t from : {5, 4, 2, 3}) {
    all.push_back(l.connect(from));
    say(all.back(), admission(kToken));
    CHECK_EQ(answer(all.back()), kAdmitted);
  }
  CHECK_EQ(heard(all[0]), std::string());
  say(all[2], identity(1));
  CHECK_EQ(answer_of(all[2], kIdentityBytes).size(), kIdentityBytes);
}
TEST(over_tls_the_proofs_cover_it) {
  Listening l;
  for (const bool right : {true, false}) {
    auto [fd, secured] = socket_pair();
    l.acceptor->introduce(std::move(secured), "both certificates");
    const std::string said = introduced(fd, identity(1), true);
    const std::string covered = right ? "both certificates" : "others";
    say(fd, proof(kToken, "dials over TLS", covered + said));
    if (right)
      CHECK(answer_of(fd, 33) == proof(kToken, "listens over TLS", covered + said + '\1') + '\1');
    else
      CHECK_EQ(heard(fd), std::string());
  }
  l.acceptor->stop();
  auto [late, secured] = socket_pair();
  l.acceptor->introduce(std::move(secured), "both certificates");
  CHECK_EQ(heard(late), std::string());
}
TEST(a_pump_has_its_connections_without_python) {
  Host here(0, {0, 1});
  Listening l({}, false);
  l.acceptor->give_to(*here.pump);
  for (const uint8_t purpose : {0, 1}) {
    const Fd fd = l.connect();
    const std::string said = introduced(fd, identity(1, purpose));
    say(fd, proof(kToken, "dials", said));
    CHECK_EQ(answer_of(fd, 33).back(), '\1');
    if (purpose == 0) CHECK_EQ(answer_of(fd, 16).size(), 16u);  // the pump has begun its own handshake
    if (purpose == 1) CHECK_EQ(l.taken().size(), 1u);
  }
  here.pump->give_up(1, "a test");
  const Fd late = l.connect();
  const std::string said = introduced(late, identity(1));
  say(late, proof(kToken, "dials", said));
  CHECK_EQ(heard(late).size(), 33u);
  CHECK_EQ(l.acceptor->counts().let_in, 3u);
  CHECK(l.acceptor->take().empty());
}
TEST(a_pump_has_its_connections_though_python_takes_none) {
  Host here(0, {0, 1});
  Listening l({.most_ready = 2}, false);
  l.acceptor->give_to(*here.pump);
  std::vector<Fd> all;
  for (const uint8_t purpose : {1, 1, 1, 0}) {
    all.push_back(l.connect());
    const std::string who = identity(1, purpose);
    if (all.size() == 3) {  // there is no room for it, and it hears so before it has proved itself
      say(all.back(), admission(kToken));
      CHECK_EQ(answer(all.back()), kAdmitted);
      say(all.back(), who);
      CHECK_EQ(heard(all.back()), std::string());
      continue;
    }
    const std::string said = introduced(all.back(), who);
    say(all.back(), proof(kToken, "dials", said));
    CHECK_EQ(answer_of(all.back(), 33).back(), '\1');
    if (purpose == 0) CHECK_EQ(answer_of(all.back(), 16).size(), 16u);  // the pump has it
  }
  CHECK_EQ(l.acceptor->counts().let_in, 3u);
  CHECK_EQ(l.acceptor->counts().dropped, 1u);
}
TEST(without_a_descriptor_who_comes_is_turned_away_and_it_goes_on) {
  Listening l;
  std::vector<Fd> several;
  for (int i = 0; i < 3; ++i) several.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit before, none;
  ::getrlimit(RLIMIT_NOFILE, &before);
  none = before;
  const Fd lowest = dup_cloexec(0);
  none.rlim_cur = rlim_t(lowest.get());
  ::setrlimit(RLIMIT_NOFILE, &none);
  const int rc = ::connect(several[0].get(), reinterpret_cast<const sockaddr*>(&l.at), sizeof l.at);
  const std::string told = heard(several[0]);
  ::setrlimit(RLIMIT_NOFILE, &before);
  CHECK_EQ(rc, 0);
  CHECK_EQ(told, std::string());
  const Fd one = l.connect();
  say(one, admission(kToken));
  CHECK_EQ(answer(one), kAdmitted);
}
TEST(it_stops_with_some_under_way_and_counts_are_read_meanwhile) {
  Listening l;
  std::atomic<bool> over{false};
  std::thread reads([&] {
    while (!over.load()) {
      l.acceptor->counts();
      l.acceptor->take();
      l.acceptor->reasons();
    }
  });
  std::vector<Fd> all;
  for (int i = 0; i < 50; ++i) {
    all.push_back(l.connect());
    if (i % 3 == 0) say(all.back(), admission(kToken));
    if (i % 3 == 1) say(all.back(), "garbage");
  }
  l.acceptor->stop();
  over.store(true);
  reads.join();
  for (const Fd& fd : all) heard(fd);
}
