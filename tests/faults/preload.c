/* Loaded into a daemon: its wall clock can be set, and a forced write of a file can fail as the kernel lets it
 * fail: once, with what was to be written lost and later calls content. Or every write of a file fails for a while.
 *
 * REFUSE_MATCH  part of the paths that cannot be written, while the file REFUSE_FILE exists.
 * REFUSE_FILE   holds the number of the error, as text.
 * CLOCK_FILE    holds the seconds to be added to the wall clock, as text; read at most every 10 ms.
 * LOSSY_MATCH   part of the paths whose fsync or fdatasync fails.
 * LOSSY_AT      at which such call.
 * LOSSY_RECORD  where the loss is recorded: `lost`, path, inode, first byte, end; then what is written anew or
 *               cut off of such files, as `new` with the same fields.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long long offset(void) {
    static _Atomic long long value, looked;
    const char *path = getenv("CLOCK_FILE");
    if (!path) return 0;
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    long long millis = now.tv_sec * 1000LL + now.tv_nsec / 1000000;
    if (millis - looked < 10) return value;
    looked = millis;
    char text[32] = {0};
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (read(fd, text, sizeof text - 1) > 0) value = atoll(text);
        close(fd);
    }
    return value;
}

int clock_gettime(clockid_t clock, struct timespec *to) {
    int result = (int)syscall(SYS_clock_gettime, clock, to);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) to->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *restrict to, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}

/* How much of each file is on the disk. */
static struct { dev_t device; ino_t inode; off_t safe; } known[256];
static int count, calls;
static _Atomic int failed;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Whether it is a file of interest, and what is known of it. */
static int matches(int fd, char path[4096], struct stat *file) {
    const char *match = getenv("LOSSY_MATCH");
    char link[64];
    if (!match) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, 4095);
    if (length < 0 || fstat(fd, file) != 0 || !S_ISREG(file->st_mode)) return 0;
    path[length] = 0;
    return strstr(path, match) != NULL;
}

static void record(const char *what, const char *path, const struct stat *file, long long from, long long to) {
    char line[4300];
    int length = snprintf(line, sizeof line, "%s\t%s\t%lld\t%lld\t%lld\n", what, path, (long long)file->st_ino, from, to);
    int fd = open(getenv("LOSSY_RECORD"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd >= 0) {
        syscall(SYS_write, fd, line, length);
        close(fd);
    }
}

/* The error with which a write of this file fails now, or 0. */
static int refused(int fd) {
    const char *match = getenv("REFUSE_MATCH"), *file = getenv("REFUSE_FILE");
    char link[64], path[4096], text[16] = {0};
    if (!match || !file) return 0;
    int kept = errno, number = 0, why = open(file, O_RDONLY | O_CLOEXEC);
    if (why >= 0) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, 4095);
        path[length < 0 ? 0 : length] = 0;
        if (strstr(path, match) && read(why, text, sizeof text - 1) > 0) number = atoi(text);
        close(why);
    }
    errno = number ? number : kept;
    return number;
}

static int force(int fd, int number) {
    char path[4096];
    struct stat file;
    if (refused(fd)) return -1;
    if (!matches(fd, path, &file)) return (int)syscall(number, fd);
    pthread_mutex_lock(&lock);
    int at = 0, fails = 0;
    while (at < count && (known[at].device != file.st_dev || known[at].inode != file.st_ino)) at++;
    if (at == count && count < 255) {
        known[at].device = file.st_dev;
        known[at].inode = file.st_ino;
        known[at].safe = 0;
        count++;
    }
    if (++calls == atoi(getenv("LOSSY_AT") ? getenv("LOSSY_AT") : "0")) {
        record("lost", path, &file, known[at].safe, file.st_size);
        fails = failed = 1;
    }
    known[at].safe = file.st_size;
    pthread_mutex_unlock(&lock);
    if (fails) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(number, fd);
}

int fsync(int fd) { return force(fd, SYS_fsync); }
int fdatasync(int fd) { return force(fd, SYS_fdatasync); }

static void again(int fd, long long from, long long length) {
    char path[4096];
    struct stat file;
    if (failed && length > 0 && matches(fd, path, &file)) record("new", path, &file, from, from + length);
}

int ftruncate64(int fd, off64_t length) {
    again(fd, length, 1LL << 40);
    return (int)syscall(SYS_ftruncate, fd, length);
}
int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }

ssize_t pwrite64(int fd, const void *from, size_t size, off64_t at) {
    if (refused(fd)) return -1;
    ssize_t done = syscall(SYS_pwrite64, fd, from, size, at);
    if (done > 0) again(fd, at, done);
    return done;
}
ssize_t pwrite(int fd, const void *from, size_t size, off_t at) { return pwrite64(fd, from, size, at); }

ssize_t write(int fd, const void *from, size_t size) {
    if (refused(fd)) return -1;
    ssize_t done = syscall(SYS_write, fd, from, size);
    if (failed && done > 0) {
        int kept = errno;
        off_t end = lseek(fd, 0, SEEK_CUR);
        if (end >= 0) again(fd, end - done, done);
        errno = kept;
    }
    return done;
}
