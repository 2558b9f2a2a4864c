/* Loaded into a daemon: makes it wait for what a machine may have none of for a while.
 *
 * HOLD_OPENS    while this file exists, whoever opens a file below HOLD_BELOW waits, as on a disk that hangs.
 * HOLD_RANDOM   while it exists, there are no random bytes: who may wait waits, who may not is told EAGAIN; where the
 *               file has a text, the call is refused (ENOSYS), as a filter of system calls does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int held(const char *variable) {
    const char *file = getenv(variable);
    return file && syscall(SYS_faccessat, AT_FDCWD, file, F_OK) == 0;
}

static void rest(void) {
    struct timespec time = {0, 5000000};
    nanosleep(&time, NULL);
}

static int opened(int dir, const char *path, int flags, mode_t mode) {
    const char *below = getenv("HOLD_BELOW");
    int kept = errno;
    if (below && strstr(path, below)) {
        while (held("HOLD_OPENS")) rest();
    }
    errno = kept;
    return (int)syscall(SYS_openat, dir, path, flags, mode);
}

static mode_t mode_of(int flags, va_list rest_of_call) {
    return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest_of_call, mode_t) : 0;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = mode_of(flags, more); \
        va_end(more); \
        return opened(AT_FDCWD, path, flags, mode); \
    }

OPEN(open)
OPEN(open64)

ssize_t getrandom(void *to, size_t size, unsigned int flags) {
    struct stat file;
    int kept = errno;
    while (held("HOLD_RANDOM")) {
        int refuses = stat(getenv("HOLD_RANDOM"), &file) == 0 && file.st_size > 0;
        if (refuses || (flags & GRND_NONBLOCK)) {
            errno = refuses ? ENOSYS : EAGAIN;
            return -1;
        }
        rest();
    }
    errno = kept;
    return syscall(SYS_getrandom, to, size, flags);
}
