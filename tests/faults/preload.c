/* Loaded into a daemon: its wall clock can be set, and a forced write of a file can fail as the kernel lets it
 * fail: once, with what was to be written lost and later calls content.
 *
 * CLOCK_FILE    holds the seconds to be added to the wall clock, as text; read at most every 10 ms.
 * LOSSY_MATCH   part of the paths whose fsync or fdatasync fails.
 * LOSSY_AT      at which such call.
 * LOSSY_RECORD  where the loss is recorded: path, first byte lost, end of what is lost.
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
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int force(int fd, int number) {
    const char *match = getenv("LOSSY_MATCH");
    char link[64], path[4096];
    struct stat file;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (!match || length < 0 || fstat(fd, &file) != 0 || !S_ISREG(file.st_mode)) return (int)syscall(number, fd);
    path[length] = 0;
    if (!strstr(path, match)) return (int)syscall(number, fd);
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
        FILE *record = fopen(getenv("LOSSY_RECORD"), "a");
        fprintf(record, "%s\t%lld\t%lld\t%lld\n", path, (long long)file.st_ino, (long long)known[at].safe, (long long)file.st_size);
        fclose(record);
        fails = 1;
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
