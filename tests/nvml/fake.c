/*
 * A library of a GPU driver for machines without GPUs.
 *
 * Owns the calls of NVML that this product makes, in their newer forms or, built with -DOLD, in those of
 * drivers before 510. It says what the file `<its own path>.state` says, read anew at each call, so that a test
 * changes the world by replacing that file. One word opens each line:
 *
 *   init N              nvmlInit fails with error N, for example 9: the kernel module is not loaded
 *   driver TEXT         the version of the driver
 *   cuda N              as 12040 for 12.4
 *   count N             how many GPUs are counted, whatever the lines below say
 *   fail CALL N         the call fails with error N, for example 3: not supported
 *   hang CALL           the call never returns
 *   hang-at N           the Nth call of a process never returns
 *   stubborn            what hangs cannot be ended but by SIGKILL
 *   gpu K=V...          a GPU; keys uuid name memory used utilization temperature power pci processes
 *                       graphics mps (each PID:BYTES,... with `?` for bytes that are not told), mig (places for
 *                       parts), handle (asking for it fails with this error), error (asking it anything but
 *                       its name does), garbage (1: no text of it is text)
 *   part K=V...         a part of the GPU above; keys uuid memory used processes
 *
 * In a value `_` stands for a blank; a key that is left out is not supported. A file
 * `<its own path>.users/UUID.PID` is one more process of that GPU or part, and holds the bytes it takes: a job
 * that is to use a GPU writes one. What hangs first writes its number as a line of `<its own path>.hung`.
 * Built by tests/src/nvml.rs.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, LOST = 15 };
enum { GPUS = 64, PARTS = 8, TEXT = 512 };

typedef unsigned long long bytes;
typedef struct { unsigned pid; bytes memory; unsigned gpu, compute; } process;
typedef struct { bytes total, free, used; } memory_v1;
typedef struct { unsigned version; bytes total, reserved, free, used; } memory_v2;
typedef struct {
    char old_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} pci_info;

/* What a GPU or a part says: its line, and where in the file the words of it are. */
typedef struct { char line[TEXT]; int parent, places; } thing;

static struct {
    thing gpus[GPUS], parts[GPUS][PARTS];
    int count, part_count[GPUS];
    char text[64 << 10];
} world;

static unsigned long calls;

static const char *own_path(const char *ending) {
    static char path[4096];
    Dl_info info;
    snprintf(path, sizeof path, "%s%s", dladdr(&calls, &info) ? info.dli_fname : "", ending);
    return path;
}

/* The text after `KEY=` in a line of the state, up to the next blank; false when there is none. */
static int value(const char *line, const char *key, char *to, size_t size) {
    size_t length = strlen(key);
    for (const char *at = strchr(line, ' '); at; at = strchr(at + 1, ' ')) {
        if (strncmp(at + 1, key, length) || at[1 + length] != '=') continue;
        snprintf(to, size, "%.*s", (int)strcspn(at + length + 2, " \n"), at + length + 2);
        for (char *c = to; *c; c++) if (*c == '_') *c = ' ';
        return 1;
    }
    return 0;
}

static int number(const char *line, const char *key, bytes *to) {
    char text[TEXT];
    if (!value(line, key, text, sizeof text)) return 0;
    *to = strtoull(text, NULL, 10);
    return 1;
}

/* The line of the state that begins with these words, after them; NULL when there is none. */
static const char *said(const char *words) {
    static char line[TEXT];
    size_t length = strlen(words);
    for (const char *at = world.text; at && *at; at = strchr(at, '\n'), at += at != NULL) {
        if (strncmp(at, words, length) || !strchr(" \n", at[length])) continue;
        snprintf(line, sizeof line, "%.*s", (int)strcspn(at + length, "\n"), at + length);
        return line + (*line == ' ');
    }
    return NULL;
}

static void read_state(void) {
    FILE *file = fopen(own_path(".state"), "r");
    size_t length = file ? fread(world.text, 1, sizeof world.text - 1, file) : 0;
    if (file) fclose(file);
    world.text[length] = 0;
    world.count = 0;
    memset(world.part_count, 0, sizeof world.part_count);
    for (char *at = world.text; at && *at; at = strchr(at, '\n'), at += at != NULL) {
        thing *it = NULL;
        int last = world.count - 1;
        if (!strncmp(at, "gpu ", 4) && world.count < GPUS)
            it = &world.gpus[world.count++], it->parent = -1;
        else if (!strncmp(at, "part ", 5) && last >= 0 && world.part_count[last] < PARTS)
            it = &world.parts[last][world.part_count[last]++], it->parent = last;
        if (it) snprintf(it->line, TEXT, "%.*s", (int)strcspn(at, "\n"), at);
    }
}

static void hang(void) {
    FILE *hung = fopen(own_path(".hung"), "a");
    sigset_t all;
    sigfillset(&all);
    if (said("stubborn")) sigprocmask(SIG_BLOCK, &all, NULL);
    if (hung) fprintf(hung, "%d\n", (int)getpid()), fclose(hung);
    for (;;) pause();
}

/* Opens each call: reads the world, and hangs or fails when it says so. */
static int begin(const char *call) {
    char words[128];
    read_state();
    calls++;
    const char *at = said("hang-at");
    snprintf(words, sizeof words, "hang %s", call);
    if ((at && calls == strtoul(at, NULL, 10)) || said(words)) hang();
    snprintf(words, sizeof words, "fail %s", call);
    const char *code = said(words);
    return code ? atoi(code) : SUCCESS;
}

/* The same for a call to a GPU, which a handle names: a thing of the world, for as long as it is there. */
static int begin_with(const char *call, const thing *of) {
    bytes code = SUCCESS;
    int failed = begin(call);
    if (failed) return failed;
    if (of->parent < 0 ? of - world.gpus >= world.count : of->parent >= world.count) return LOST;
    number(of->line, "error", &code);
    return (int)code;
}

static int put_text(const char *text, char *to, unsigned size) {
    if (strlen(text) >= size) return TOO_SMALL;
    strcpy(to, text);
    return SUCCESS;
}

static int put_value(const thing *of, const char *key, char *to, unsigned size) {
    char text[TEXT] = "";
    bytes is_garbage = 0;
    number(of->line, "garbage", &is_garbage);
    if (is_garbage) return put_text("\xff\xfe\x1b[31m,\x01\x80", to, size);
    value(of->line, key, text, sizeof text);
    return put_text(text, to, size);
}

static int put_number(const thing *of, const char *key, unsigned *to) {
    bytes number_of = 0;
    if (!number(of->line, key, &number_of)) return NOT_SUPPORTED;
    *to = (unsigned)number_of;
    return SUCCESS;
}

/* The next process of a directory of users; false at its end. */
static int next_user(DIR *users, const char *uuid, process *it) {
    size_t length = strlen(uuid);
    for (struct dirent *entry; users && (entry = readdir(users));) {
        char path[4096 + 300];
        if (strncmp(entry->d_name, uuid, length) || entry->d_name[length] != '.') continue;
        snprintf(path, sizeof path, "%s/%s", own_path(".users"), entry->d_name);
        FILE *file = fopen(path, "r");
        *it = (process){(unsigned)atoi(entry->d_name + length + 1), 0, ~0u, ~0u};
        if (file && fscanf(file, "%llu", &it->memory) != 1) it->memory = 0;
        if (file) fclose(file);
        return 1;
    }
    return 0;
}

/* Lists the processes of a kind: those of the line, and for those who compute the ones that wrote a file. */
static int processes(const thing *of, const char *key, unsigned *count, process *to) {
    char text[TEXT] = "", uuid[TEXT] = "";
    process found[99];
    unsigned number_of = 0;
    value(of->line, key, text, sizeof text);
    char *next, *at = strtok_r(text, ",", &next);
    for (; at && number_of < 99; at = strtok_r(NULL, ",", &next)) {
        const char *memory = strchr(at, ':');
        bytes taken = !memory || memory[1] == '?' ? ~0ull : strtoull(memory + 1, NULL, 10);
        found[number_of++] = (process){(unsigned)atoi(at), taken, ~0u, ~0u};
    }
    if (!strcmp(key, "processes") && value(of->line, "uuid", uuid, sizeof uuid)) {
        DIR *users = opendir(own_path(".users"));
        while (number_of < 99 && next_user(users, uuid, &found[number_of])) number_of++;
        if (users) closedir(users);
    }
    unsigned room = *count;
    *count = number_of;
    if (number_of > room || (number_of && !to)) return TOO_SMALL;
    if (number_of) memcpy(to, found, number_of * sizeof *to);
    return SUCCESS;
}

/* Memory of a GPU or a part; what the users say they take is used on top. */
static int memory(const thing *of, bytes *total, bytes *used) {
    char uuid[TEXT] = "";
    process user;
    if (!number(of->line, "memory", total)) return NOT_SUPPORTED;
    *used = 0;
    number(of->line, "used", used);
    if (!value(of->line, "uuid", uuid, sizeof uuid)) return SUCCESS;
    DIR *users = opendir(own_path(".users"));
    while (next_user(users, uuid, &user)) *used += user.memory;
    if (users) closedir(users);
    return SUCCESS;
}

#define OPEN                                                                                                 \
    int failed = begin(__func__);                                                                            \
    if (failed) return failed
#define OPEN_WITH(of)                                                                                        \
    int failed = begin_with(__func__, of);                                                                   \
    if (failed) return failed
#define LIST(name, key)                                                                                      \
    int name(const thing *of, unsigned *count, process *to) {                                                \
        OPEN_WITH(of);                                                                                       \
        return processes(of, key, count, to);                                                                \
    }

int nvmlInit_v2(void) {
    OPEN;
    const char *code = said("init");
    return code ? atoi(code) : SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return nvmlInit_v2();
}

int nvmlShutdown(void) {
    OPEN;
    return SUCCESS;
}

const char *nvmlErrorString(int code) { return code ? "an error of the fake" : "no error"; }

int nvmlSystemGetDriverVersion(char *to, unsigned size) {
    OPEN;
    const char *version = said("driver");
    return put_text(version ? version : "550.54.15", to, size);
}

int nvmlSystemGetNVMLVersion(char *to, unsigned size) {
    OPEN;
    return put_text("12.550.54.15", to, size);
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    OPEN;
    const char *counted = said("count");
    *count = counted ? (unsigned)strtoul(counted, NULL, 10) : (unsigned)world.count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, const thing **to) {
    OPEN;
    bytes code = SUCCESS;
    if (index >= (unsigned)world.count) return INVALID;
    *to = &world.gpus[index];
    number(world.gpus[index].line, "handle", &code);
    return (int)code;
}

int nvmlDeviceGetUUID(const thing *of, char *to, unsigned size) {
    /* A GPU that fails at everything else is still known by its name. */
    int failed = begin(__func__);
    return failed ? failed : put_value(of, "uuid", to, size);
}

int nvmlDeviceGetName(const thing *of, char *to, unsigned size) {
    OPEN_WITH(of);
    return put_value(of, "name", to, size);
}

int nvmlDeviceGetUtilizationRates(const thing *of, unsigned to[2]) {
    OPEN_WITH(of);
    to[1] = 0;
    return put_number(of, "utilization", &to[0]);
}

int nvmlDeviceGetTemperature(const thing *of, unsigned sensor, unsigned *to) {
    (void)sensor;
    OPEN_WITH(of);
    return put_number(of, "temperature", to);
}

int nvmlDeviceGetPowerUsage(const thing *of, unsigned *to) {
    OPEN_WITH(of);
    return put_number(of, "power", to);
}

int nvmlDeviceGetEnforcedPowerLimit(const thing *of, unsigned *to) {
    OPEN_WITH(of);
    *to = 700000;
    return SUCCESS;
}

int nvmlDeviceGetMinorNumber(const thing *of, unsigned *to) {
    OPEN_WITH(of);
    *to = (unsigned)(of - world.gpus);
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(const thing *of, int *major, int *minor) {
    OPEN_WITH(of);
    *major = 9, *minor = 0;
    return SUCCESS;
}

#ifdef OLD

int nvmlSystemGetCudaDriverVersion(int *to) {
    OPEN;
    *to = 11000;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(const thing *of, memory_v1 *to) {
    OPEN_WITH(of);
    failed = memory(of, &to->total, &to->used);
    to->free = to->total - to->used;
    return failed;
}

LIST(nvmlDeviceGetComputeRunningProcesses_v2, "processes")
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics")

#else

int nvmlSystemGetCudaDriverVersion_v2(int *to) {
    OPEN;
    const char *version = said("cuda");
    *to = version ? atoi(version) : 12040;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(const thing *of, memory_v2 *to) {
    OPEN_WITH(of);
    if (to->version != (sizeof *to | 2u << 24)) return INVALID;
    failed = memory(of, &to->total, &to->used);
    to->reserved = 0, to->free = to->total - to->used;
    return failed;
}

int nvmlDeviceGetPciInfo_v3(const thing *of, pci_info *to) {
    OPEN_WITH(of);
    memset(to, 0, sizeof *to);
    return put_value(of, "pci", to->id, sizeof to->id);
}

LIST(nvmlDeviceGetComputeRunningProcesses_v3, "processes")
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps")

int nvmlDeviceGetMigMode(const thing *of, unsigned *current, unsigned *pending) {
    OPEN_WITH(of);
    failed = put_number(of, "mig", current);
    *current = *pending = !failed;
    return failed;
}

int nvmlDeviceGetMaxMigDeviceCount(const thing *of, unsigned *to) {
    OPEN_WITH(of);
    return put_number(of, "mig", to);
}

int nvmlDeviceGetMigDeviceHandleByIndex(const thing *of, unsigned index, const thing **to) {
    OPEN_WITH(of);
    long at = of - world.gpus;
    if (index >= (unsigned)world.part_count[at]) return NOT_FOUND;
    *to = &world.parts[at][index];
    return SUCCESS;
}

#endif
