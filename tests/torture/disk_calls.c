/* Preloaded into every process of a scenario: logs what reaches the disk, and fails calls.

   TORTURE_DISK: only files below this folder count.
   TORTURE_SYNCED: a folder. `log` in it gets a line for each fsync and each rename that succeeds.
   It also keeps a link to each file that a rename replaces, so that the rename can be undone.
   TORTURE_FAILS: a file with a `struct failing`, which the campaign maps and changes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, WRITE, SYNC, RENAME, OPEN, MKDIR, UNLINK };
struct failing { int call, error, left, met; };
#define SHORT -1 /* an `error`: half of a write succeeds */

static struct failing *failing;
static char disk[PATH_MAX], synced[PATH_MAX];

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("TORTURE_DISK"), *log = getenv("TORTURE_SYNCED");
    const char *fails = getenv("TORTURE_FAILS");
    snprintf(disk, sizeof disk, "%s/", folder ? folder : "");
    snprintf(synced, sizeof synced, "%s", log ? log : "");
    int file = fails ? (int)syscall(SYS_openat, AT_FDCWD, fails, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof *failing, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    failing = found == MAP_FAILED ? NULL : found;
    syscall(SYS_close, file);
}

/* The functions of the C library behind these. */
#define NEXT(type, name, ...) \
    static type (*next)(__VA_ARGS__); \
    if (!next) next = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int below(const char *path) {
    size_t length = strlen(disk) - 1; /* without the slash: the folder itself counts, too */
    return length && !strncmp(path, disk, length) && (path[length] == '/' || !path[length]);
}

static int path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length >= 0;
}

static void absolute(int folder, const char *name, char *path) {
    char start[PATH_MAX] = "";
    if (name[0] != '/') {
        int here = folder == AT_FDCWD;
        int known = here ? getcwd(start, sizeof start) != NULL : path_of(folder, start);
        if (!known) start[0] = 0;
    }
    const char *slash = start[0] ? "/" : "";
    if (snprintf(path, PATH_MAX, "%s%s%s", start, slash, name) >= PATH_MAX) path[0] = 0;
}

static void note(const char *line, int length) {
    char path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s/log", synced);
    int file = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0) return;
    syscall(SYS_write, file, line, length);
    syscall(SYS_close, file);
}

/* Returns whether a call on this path is to fail now, and sets errno. */
static int fails(int call, const char *path) {
    if (!failing || failing->call != call || !below(path)) return 0;
    if (__atomic_fetch_sub(&failing->left, 1, __ATOMIC_SEQ_CST) <= 0) return 0;
    __atomic_fetch_add(&failing->met, 1, __ATOMIC_SEQ_CST);
    errno = failing->error;
    return 1;
}

static int fails_at(int call, int folder, const char *name) {
    char path[PATH_MAX];
    if (!failing || failing->call != call) return 0;
    absolute(folder, name, path);
    return fails(call, path);
}

static int fails_in(int call, int file) {
    char path[PATH_MAX];
    return failing && failing->call == call && path_of(file, path) && fails(call, path);
}

static int synchronise(int file, int (*real)(int)) {
    char path[PATH_MAX], line[PATH_MAX + 64];
    struct stat seen;
    int known = disk[1] && path_of(file, path) && below(path) && !fstat(file, &seen);
    if (known && fails(SYNC, path)) return -1;
    int result = real(file);
    if (!result && known && synced[0]) {
        long size = seen.st_size;
        note(line, snprintf(line, sizeof line, "S\t%lu\t%ld\t%s\n", seen.st_ino, size, path));
    }
    return result;
}

int fsync(int file) { NEXT(int, "fsync", int); return synchronise(file, next); }
int fdatasync(int file) { NEXT(int, "fdatasync", int); return synchronise(file, next); }

int renameat(int from, const char *old, int to, const char *new) {
    NEXT(int, "renameat", int, const char *, int, const char *);
    static int number;
    char before[PATH_MAX], after[PATH_MAX], kept[2 * PATH_MAX] = "", line[5 * PATH_MAX];
    absolute(from, old, before);
    absolute(to, new, after);
    int known = below(after);
    if (known && fails(RENAME, after)) return -1;
    if (known && synced[0]) {
        int next_number = __atomic_add_fetch(&number, 1, __ATOMIC_SEQ_CST);
        snprintf(kept, sizeof kept, "%s/%d-%d", synced, getpid(), next_number);
        if (linkat(AT_FDCWD, after, AT_FDCWD, kept, 0)) kept[0] = 0;
    }
    int result = next(from, old, to, new);
    if (!result && known && synced[0])
        note(line, snprintf(line, sizeof line, "R\t%s\t%s\t%s\n", before, after, kept));
    return result;
}

int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }

ssize_t write(int file, const void *content, size_t length) {
    NEXT(ssize_t, "write", int, const void *, size_t);
    if (fails_in(WRITE, file)) {
        if (errno != SHORT) return -1;
        if (length < 2) return next(file, content, length);
        length /= 2;
    }
    return next(file, content, length);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    NEXT(ssize_t, "writev", int, const struct iovec *, int);
    if (fails_in(WRITE, file) && failing->error != SHORT) return -1;
    return next(file, parts, count);
}

#define OPENS(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT))
#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); \
    }
#define OPENER(name) \
    int name(const char *path, int flags, ...) { \
        NEXT(int, #name, const char *, int, ...); \
        MODE(flags) \
        return OPENS(flags) && fails_at(OPEN, AT_FDCWD, path) ? -1 : next(path, flags, mode); \
    }
#define OPENER_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        NEXT(int, #name, int, const char *, int, ...); \
        MODE(flags) \
        if (OPENS(flags) && fails_at(OPEN, folder, path)) return -1; \
        return next(folder, path, flags, mode); \
    }
OPENER(open)
OPENER(open64)
OPENER_AT(openat)
OPENER_AT(openat64)

int mkdir(const char *path, mode_t mode) {
    NEXT(int, "mkdir", const char *, mode_t);
    return fails_at(MKDIR, AT_FDCWD, path) ? -1 : next(path, mode);
}

int unlink(const char *path) {
    NEXT(int, "unlink", const char *);
    return fails_at(UNLINK, AT_FDCWD, path) ? -1 : next(path);
}

int unlinkat(int folder, const char *path, int flags) {
    NEXT(int, "unlinkat", int, const char *, int);
    return fails_at(UNLINK, folder, path) ? -1 : next(folder, path, flags);
}
