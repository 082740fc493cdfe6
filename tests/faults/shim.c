/* Preloaded into a process under test: counts its calls that touch files in one folder or talk over the network, and at
   the n-th of them kills the process, signals it, lets calls fail, or sets the clock. It must do nothing before
   fault_arm() is called, or FAULT_ARM is found where it is loaded.

   A write that is struck is torn: half of its bytes reach the file first, as on a disk that fills up. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { CHANGE = 1, SPACE = 2, READ = 4, RENAME = 8 }; /* SPACE: of those that change the disk, what takes room on it */
enum { COUNT, KILL, FAIL, SIGNAL, CLOCK };

static char folder[PATH_MAX];
static size_t folder_length;
static int classes, action, with, lasting;
static atomic_long calls, strike_at;
static atomic_int armed;

void fault_arm(const char *path, int which, long at, int what, int number, int from_then_on) {
    folder_length = (size_t)snprintf(folder, sizeof folder, "%s", path);
    classes = which, action = what, with = number, lasting = from_then_on;
    atomic_store(&calls, 0);
    atomic_store(&strike_at, at);
    atomic_store(&armed, 1);
}

long fault_calls(void) { return atomic_load(&calls); }

/* FAULT_ARM is for the one process that is started with it: "classes at action number lasting folder\ntold", and into the
   file `told` goes how many calls it made when it ends by itself. */
static char told[PATH_MAX];

__attribute__((constructor)) static void arm_by_environment(void) {
    int which, what, number, from_then_on, begin = 0;
    long at;
    const char *words = getenv("FAULT_ARM");
    if (!words || sscanf(words, "%d %ld %d %d %d %n", &which, &at, &what, &number, &from_then_on, &begin) < 5) return;
    char path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s", words + begin);
    char *end = strchr(path, '\n');
    if (!begin || !end) return;
    *end = 0;
    snprintf(told, sizeof told, "%s", end + 1);
    unsetenv("FAULT_ARM");
    fault_arm(path, which, at, what, number, from_then_on);
}

__attribute__((destructor)) static void tell_calls(void) {
    FILE *file = told[0] && atomic_exchange(&armed, 0) ? fopen(told, "w") : NULL;
    if (!file) return;
    fprintf(file, "%ld", fault_calls());
    fclose(file);
}

static int within(const char *path) {
    return !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}

static int fd_within(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return within(path);
}

static int at_within(int fd, const char *path) {
    if (path[0] == '/') return within(path);
    if (fd != AT_FDCWD) return fd_within(fd);
    char here[PATH_MAX];
    return getcwd(here, sizeof here) && within(here);
}

/* 0: go on; -1: fail with errno set; 1: let half through, then come again with `torn`. */
static int struck(int kind, int inside, int tearable, int torn) {
    if (!atomic_load(&armed) || !(kind & classes) || !inside) return 0;
    long now = torn ? atomic_load(&calls) : atomic_fetch_add(&calls, 1) + 1, at = atomic_load(&strike_at);
    if (action == COUNT || now < at || (now > at && !lasting)) return 0;
    if (action == CLOCK) return 0;
    if (tearable && !torn && now == at && action != SIGNAL) return 1;
    if (action == KILL) kill(getpid(), SIGKILL), pause();
    if (action == SIGNAL) {
        if (now == at) kill(getpid(), with);
        return 0;
    }
    if (torn) return 0; /* half was written; the next call fails */
    errno = with;
    return -1;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define FAILS(kind, inside) (atomic_load(&armed) && struck(kind, inside, 0, 0) < 0)

#define OPENER(name, params, at, path, args)                                                                          \
    int name params {                                                                                                 \
        REAL(name);                                                                                                   \
        mode_t mode = 0;                                                                                              \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); } \
        if ((flags & (O_CREAT | O_TRUNC)) && FAILS(CHANGE | SPACE, at_within(at, path))) return -1;                   \
        return real args;                                                                                             \
    }
OPENER(open, (const char *path, int flags, ...), AT_FDCWD, path, (path, flags, mode))
OPENER(open64, (const char *path, int flags, ...), AT_FDCWD, path, (path, flags, mode))
OPENER(openat, (int fd, const char *path, int flags, ...), fd, path, (fd, path, flags, mode))
OPENER(openat64, (int fd, const char *path, int flags, ...), fd, path, (fd, path, flags, mode))

#define WRITER(name, params, whole, half)                                                                             \
    ssize_t name params {                                                                                             \
        REAL(name);                                                                                                   \
        int found = atomic_load(&armed) ? struck(CHANGE | SPACE, fd_within(fd), size > 1, 0) : 0;                     \
        if (found < 0) return -1;                                                                                     \
        if (!found) return real whole;                                                                                \
        ssize_t done = real half;                                                                                     \
        struck(CHANGE | SPACE, 1, 0, 1);                                                                              \
        return done;                                                                                                  \
    }
WRITER(write, (int fd, const void *data, size_t size), (fd, data, size), (fd, data, size / 2))
WRITER(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), (fd, data, size / 2, at))
WRITER(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), (fd, data, size / 2, at))

#define READER(name, params, args)                                                                                    \
    ssize_t name params { REAL(name); return FAILS(READ, fd_within(fd)) ? -1 : real args; }
READER(read, (int fd, void *data, size_t size), (fd, data, size))
READER(pread, (int fd, void *data, size_t size, off_t at), (fd, data, size, at))
READER(pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
READER(readv, (int fd, const struct iovec *parts, int count), (fd, parts, count))
READER(preadv64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
READER(preadv64v2, (int fd, const struct iovec *parts, int count, off64_t at, int how), (fd, parts, count, at, how))

/* What is sent changes what lies elsewhere; an answer that is not read any more belongs to a change that was made. */
static int far(int fd) {
    struct sockaddr_storage peer;
    socklen_t size = sizeof peer;
    int family = getpeername(fd, (struct sockaddr *)&peer, &size) ? AF_UNSPEC : peer.ss_family;
    return family == AF_INET || family == AF_INET6;
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
    REAL(send);
    int found = atomic_load(&armed) ? struck(CHANGE, far(fd), size > 1, 0) : 0;
    if (found < 0) return -1;
    if (!found) return real(fd, data, size, flags);
    ssize_t done = real(fd, data, size / 2, flags);
    struck(CHANGE, 1, 0, 1);
    return done;
}
#define TALKER(name, params, args)                                                                                    \
    ssize_t name params { REAL(name); return FAILS(CHANGE, far(fd)) ? -1 : real args; }
TALKER(sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
TALKER(recv, (int fd, void *data, size_t size, int flags), (fd, data, size, flags))

#define CHANGER(name, kind, params, inside, args)                                                                     \
    int name params { REAL(name); return FAILS(kind, inside) ? -1 : real args; }
CHANGER(mkdir, CHANGE | SPACE, (const char *path, mode_t mode), at_within(AT_FDCWD, path), (path, mode))
CHANGER(rename, CHANGE | RENAME, (const char *from, const char *to), at_within(AT_FDCWD, to), (from, to))
CHANGER(renameat, CHANGE | RENAME, (int fd, const char *from, int to, const char *path), at_within(to, path), (fd, from, to, path))
CHANGER(unlink, CHANGE, (const char *path), at_within(AT_FDCWD, path), (path))
CHANGER(unlinkat, CHANGE, (int fd, const char *path, int how), at_within(fd, path), (fd, path, how))
CHANGER(rmdir, CHANGE, (const char *path), at_within(AT_FDCWD, path), (path))
CHANGER(ftruncate64, CHANGE | SPACE, (int fd, off64_t size), fd_within(fd), (fd, size))
CHANGER(fsync, CHANGE | SPACE, (int fd), fd_within(fd), (fd))

int posix_fallocate64(int fd, off64_t at, off64_t size) {
    REAL(posix_fallocate64);
    return FAILS(CHANGE | SPACE, fd_within(fd)) ? errno : real(fd, at, size);
}

extern ssize_t sendfile64(int out, int in, off64_t *at, size_t size);
ssize_t sendfile64(int out, int in, off64_t *at, size_t size) {
    REAL(sendfile64);
    return FAILS(CHANGE | SPACE, fd_within(out)) ? -1 : real(out, in, at, size);
}

/* From the n-th call on the time of day is off by `with` seconds. The monotonic clock stays: the kernel wakes sleepers by it. */
int clock_gettime(clockid_t which, struct timespec *now) {
    REAL(clock_gettime);
    int found = real(which, now);
    if (action != CLOCK || !atomic_load(&armed) || atomic_load(&calls) < atomic_load(&strike_at)) return found;
    if (which == CLOCK_REALTIME) now->tv_sec += with;
    return found;
}
