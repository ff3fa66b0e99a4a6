// What plain TCP can do between two hosts: streams over several sockets, and round trips of 8
// bytes.
//
//   streams listen ADDRESS CPU MIB ROUNDS SOCKETS,...      prints "port N" first
//   streams connect ADDRESS PORT CPU MIB ROUNDS SOCKETS,...
//
// Both sides go through the same cases, ROUNDS times, and the connecting side prints a line for
// each: case, sockets, seconds. The cases take turns: "one way" moves MIB of floats from the
// connecting side to the other, "both ways" as much in each direction at once, "summed" adds what
// arrives to floats that are there already, as a reduction does. The rest is half a round trip of 8
// bytes, by a receiver that asks again and again ("polling") or sleeps: in the receive itself
// ("blocking"), until epoll tells of something to receive ("epoll"), or in one call of io_uring that
// receives ("io_uring", where the system allows it).
//
// One thread a side, on one CPU, drives all sockets by poll(). Every element of each stream's
// result is checked in the first round.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "uring.h"

typedef enum { kPolling, kBlocking, kEpoll, kUring, kWaits } Wait;
static const char* const kWaitNames[kWaits] = {"polling", "blocking", "epoll", "io_uring"};

enum { kMostSockets = 64, kStagingBytes = 256 << 10, kRoundTrips = 2000, kTimeoutMs = 60000 };

typedef struct {
  int socket;
  // Bytes of the part that this socket carries.
  size_t begin;
  size_t end;
  size_t sent;
  size_t received;
  // Bytes in `staging` that are no whole float yet.
  size_t pending;
  char* staging;
} Stream;

static int sockets[kMostSockets];
static Stream streams[kMostSockets];
static int epoll;
static Uring uring;
static float* outgoing;
static float* incoming;
static size_t bytes;

static void fail(const char* what) {
  fprintf(stderr, "streams: %s: %s\n", what, strerror(errno));
  exit(1);
}

static void fail_check(const char* what) {
  fprintf(stderr, "streams: %s\n", what);
  exit(1);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void pin(int cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  if (sched_setaffinity(0, sizeof one, &one) != 0) {
    fail("cannot take the CPU");
  }
}

static void set_blocking(int socket, int is_blocking) {
  const int flags = fcntl(socket, F_GETFL);
  if (fcntl(socket, F_SETFL, is_blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK) != 0) {
    fail("fcntl");
  }
}

static void await(struct pollfd* polled, int count) {
  const int ready = poll(polled, (nfds_t)count, kTimeoutMs);
  if (ready < 0) {
    fail("poll");
  }
  if (ready == 0) {
    fail_check("the other side has said nothing for a minute");
  }
}

// Of the first socket, which both sides use for words, too.
static void send_all(const void* data, size_t size) {
  for (size_t sent = 0; sent < size;) {
    const ssize_t count = send(sockets[0], (const char*)data + sent, size - sent, MSG_NOSIGNAL);
    if (count < 0) {
      fail("send");
    }
    sent += (size_t)count;
  }
}

static ssize_t receive_once(void* data, size_t size, Wait wait) {
  switch (wait) {
    case kPolling:
      return recv(sockets[0], data, size, MSG_DONTWAIT);
    case kUring:
      return uring_receive(&uring, sockets[0], data, size);
    case kEpoll: {
      struct epoll_event event;
      const int ready = epoll_wait(epoll, &event, 1, kTimeoutMs);
      if (ready <= 0) {
        return -1;
      }
      return recv(sockets[0], data, size, MSG_DONTWAIT);
    }
    default:
      return recv(sockets[0], data, size, 0);
  }
}

static void receive_all(void* data, size_t size, Wait wait) {
  for (size_t received = 0; received < size;) {
    const ssize_t count = receive_once((char*)data + received, size - received, wait);
    if (count == 0) {
      fail_check("the other side has ended");
    }
    if (count > 0) {
      received += (size_t)count;
    } else if (errno == EAGAIN && wait != kPolling) {
      fail_check("the other side has said nothing for a minute");
    } else if (errno != EAGAIN) {
      fail("recv");
    }
  }
}

static void meet(void) {
  char word = 'm';
  send_all(&word, 1);
  receive_all(&word, 1, kBlocking);
}

static void add(float* restrict into, const float* restrict from, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    into[i] += from[i];
  }
}

static size_t send_some(Stream* stream) {
  const ssize_t count = send(stream->socket, (char*)outgoing + stream->begin + stream->sent,
                             stream->end - stream->begin - stream->sent, MSG_NOSIGNAL);
  if (count < 0) {
    if (errno != EAGAIN) {
      fail("send");
    }
    return 0;
  }
  stream->sent += (size_t)count;
  return (size_t)count;
}

static size_t receive_some(Stream* stream, int is_summed) {
  const size_t left = stream->end - stream->begin - stream->received - stream->pending;
  char* place = (char*)incoming + stream->begin + stream->received;
  size_t room = left;
  if (is_summed) {
    room = left < kStagingBytes ? left : kStagingBytes;
    place = stream->staging + stream->pending;
  }
  const ssize_t count = recv(stream->socket, place, room, 0);
  if (count == 0) {
    fail_check("the other side has ended");
  }
  if (count < 0) {
    if (errno != EAGAIN) {
      fail("recv");
    }
    return 0;
  }
  if (!is_summed) {
    stream->received += (size_t)count;
    return (size_t)count;
  }
  const size_t there = stream->pending + (size_t)count;
  const size_t whole = there - there % sizeof(float);
  add(incoming + (stream->begin + stream->received) / sizeof(float), (float*)stream->staging,
      whole / sizeof(float));
  stream->received += whole;
  stream->pending = there - whole;
  memmove(stream->staging, stream->staging + whole, stream->pending);
  return (size_t)count;
}

static float value(size_t index) { return (float)(index % 1021); }

static void check(int is_summed) {
  for (size_t i = 0; i < bytes / sizeof(float); ++i) {
    if (incoming[i] != value(i) + (is_summed ? 1 : 0)) {
      fail_check("a stream has brought another value than was sent");
    }
  }
}

// Moves everything over `count` sockets; returns seconds, until both sides have all of theirs.
static double stream_over(int count, int sends, int receives, int is_summed, int is_checked) {
  const size_t floats = bytes / sizeof(float);
  for (int i = 0; i < count; ++i) {
    streams[i].socket = sockets[i];
    streams[i].begin = floats * (size_t)i / (size_t)count * sizeof(float);
    streams[i].end = floats * (size_t)(i + 1) / (size_t)count * sizeof(float);
    streams[i].sent = streams[i].received = streams[i].pending = 0;
    set_blocking(sockets[i], 1);
  }
  for (size_t i = 0; is_checked && i < floats; ++i) {
    incoming[i] = is_summed ? 1 : -1;
  }
  meet();
  for (int i = 0; i < count; ++i) {
    set_blocking(sockets[i], 0);
  }
  const double start = now();
  size_t to_send = sends ? bytes : 0;
  size_t to_receive = receives ? bytes : 0;
  while (to_send > 0 || to_receive > 0) {
    struct pollfd polled[kMostSockets];
    for (int i = 0; i < count; ++i) {
      const size_t size = streams[i].end - streams[i].begin;
      const int awaits_room = sends && streams[i].sent < size;
      const int awaits_data = receives && streams[i].received < size;
      polled[i].fd = awaits_room || awaits_data ? sockets[i] : -1;
      polled[i].events = (short)((awaits_room ? POLLOUT : 0) | (awaits_data ? POLLIN : 0));
      polled[i].revents = 0;
    }
    await(polled, count);
    for (int i = 0; i < count; ++i) {
      // An error is for send or recv to tell.
      const int is_failed = (polled[i].revents & (POLLERR | POLLHUP)) != 0;
      if (receives && (polled[i].events & POLLIN) && (is_failed || (polled[i].revents & POLLIN))) {
        to_receive -= receive_some(&streams[i], is_summed);
      }
      if (sends && (polled[i].events & POLLOUT) && (is_failed || (polled[i].revents & POLLOUT))) {
        to_send -= send_some(&streams[i]);
      }
    }
  }
  for (int i = 0; i < count; ++i) {
    set_blocking(sockets[i], 1);
  }
  meet();
  const double seconds = now() - start;
  if (receives && is_checked) {
    check(is_summed);
  }
  return seconds;
}

// Seconds for half of a round trip.
static double ping_pong(int is_first, Wait wait) {
  uint64_t word = 0;
  meet();
  const double start = now();
  for (int i = 0; i < kRoundTrips; ++i) {
    if (is_first) {
      send_all(&word, sizeof word);
    }
    receive_all(&word, sizeof word, wait);
    if (!is_first) {
      send_all(&word, sizeof word);
    }
  }
  return (now() - start) / kRoundTrips / 2;
}

static void report(int is_first, const char* name, int count, double seconds) {
  if (is_first) {
    printf("%s %d %.9f\n", name, count, seconds);
    fflush(stdout);
  }
}

// Whether both sides have io_uring.
static int open_waits(void) {
  struct epoll_event event = {EPOLLIN, {0}};
  epoll = epoll_create1(0);
  if (epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, sockets[0], &event) != 0) {
    fail("epoll");
  }
  const char has_uring = uring_open(&uring) == 0;
  char has_other = 0;
  send_all(&has_uring, 1);
  receive_all(&has_other, 1, kBlocking);
  return has_uring && has_other;
}

static void run(int is_first, int rounds, const char* numbers) {
  const int has_uring = open_waits();
  for (int turn = 0; turn < rounds; ++turn) {
    char text[256];
    snprintf(text, sizeof text, "%s", numbers);
    for (char* word = strtok(text, ","); word != NULL; word = strtok(NULL, ",")) {
      const int count = atoi(word);
      for (int is_summed = 0; is_summed < 2; ++is_summed) {
        const int is_checked = turn == 0;
        report(is_first, is_summed ? "one-way-summed" : "one-way", count,
               stream_over(count, is_first, !is_first, is_summed, is_checked));
        report(is_first, is_summed ? "both-ways-summed" : "both-ways", count,
               stream_over(count, 1, 1, is_summed, is_checked));
      }
    }
    for (Wait wait = kPolling; wait < (has_uring ? kWaits : kUring); ++wait) {
      report(is_first, kWaitNames[wait], 1, ping_pong(is_first, wait));
    }
  }
}

static int count_sockets(const char* numbers) {
  int most = 1;
  for (const char* place = numbers; place != NULL;) {
    const int number = atoi(place);
    most = number > most ? number : most;
    place = strchr(place, ',');
    place = place == NULL ? NULL : place + 1;
  }
  if (most > kMostSockets) {
    fail_check("64 sockets at most");
  }
  return most;
}

static struct addrinfo* resolve(const char* address, const char* port) {
  struct addrinfo hints;
  memset(&hints, 0, sizeof hints);
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  struct addrinfo* found = NULL;
  if (getaddrinfo(address, port, &hints, &found) != 0) {
    fail_check("the address is none");
  }
  return found;
}

static void accept_all(const char* address, int count) {
  struct addrinfo* place = resolve(address, "0");
  const int listener = socket(place->ai_family, SOCK_STREAM, 0);
  if (listener < 0 || bind(listener, place->ai_addr, place->ai_addrlen) != 0 ||
      listen(listener, kMostSockets) != 0) {
    fail("cannot listen");
  }
  struct sockaddr_storage own;
  socklen_t size = sizeof own;
  getsockname(listener, (struct sockaddr*)&own, &size);
  const in_port_t port = own.ss_family == AF_INET6 ? ((struct sockaddr_in6*)&own)->sin6_port
                                                   : ((struct sockaddr_in*)&own)->sin_port;
  printf("port %d\n", ntohs(port));
  fflush(stdout);
  for (int i = 0; i < count; ++i) {
    struct pollfd polled = {listener, POLLIN, 0};
    await(&polled, 1);
    sockets[i] = accept(listener, NULL, NULL);
    if (sockets[i] < 0) {
      fail("accept");
    }
  }
  close(listener);
  freeaddrinfo(place);
}

static void connect_all(const char* address, const char* port, int count) {
  struct addrinfo* place = resolve(address, port);
  for (int i = 0; i < count; ++i) {
    sockets[i] = socket(place->ai_family, SOCK_STREAM, 0);
    if (sockets[i] < 0 || connect(sockets[i], place->ai_addr, place->ai_addrlen) != 0) {
      fail("cannot connect");
    }
  }
  freeaddrinfo(place);
}

int main(int argc, char** argv) {
  const int is_first = argc == 8 && strcmp(argv[1], "connect") == 0;
  if (!is_first && (argc != 7 || strcmp(argv[1], "listen") != 0)) {
    fail_check("listen ADDRESS CPU MIB ROUNDS SOCKETS, or connect ADDRESS PORT CPU ...");
  }
  char** rest = argv + (is_first ? 4 : 3);
  pin(atoi(rest[0]));
  bytes = (size_t)atoi(rest[1]) << 20;
  const int count = count_sockets(rest[3]);
  outgoing = malloc(bytes);
  incoming = malloc(bytes);
  if (outgoing == NULL || incoming == NULL) {
    fail("no memory");
  }
  memset(incoming, 0, bytes);
  for (size_t i = 0; i < bytes / sizeof(float); ++i) {
    outgoing[i] = value(i);
  }
  for (int i = 0; i < count; ++i) {
    streams[i].staging = malloc(kStagingBytes + sizeof(float));
    if (streams[i].staging == NULL) {
      fail("no memory");
    }
  }
  if (is_first) {
    connect_all(argv[2], argv[3], count);
  } else {
    accept_all(argv[2], count);
  }
  const struct timeval limit = {kTimeoutMs / 1000, 0};
  for (int i = 0; i < count; ++i) {
    const int one = 1;
    setsockopt(sockets[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(sockets[i], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(sockets[i], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  }
  run(is_first, atoi(rest[2]), rest[3]);
  return 0;
}
