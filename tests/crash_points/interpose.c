/* Log every call that changes files below one folder, in one order for all processes; fail one call.

   Preloaded with LD_PRELOAD. CRASH_ROOT: the folder, without symbolic links. CRASH_LOG: the log.
   CRASH_SHARED: a file of zeros, of sizeof(struct shared) or more, that all processes map.

   A process-shared lock is held from before each call until its record is written. So the order of
   the records is the order of the calls, also between processes, and no effect precedes its cause.
   A write through a FILE* or a mapping does not pass here. `disk.py` compares its model with the
   real folder, and so it notices such a write. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, SYNC, RENAME, UNLINK, MKDIR, LINK, TRUNCATE, FAILED };
enum { ONCE, FROM_THEN_ON, SHORT_WRITE, SYNCS_FROM_THEN_ON };

struct shared {
    /* tests/crash_points/record.py writes the first four fields. */
    uint64_t calls, fail_at;
    int32_t error, how;
    int32_t state;
    pthread_mutex_t lock;
};
struct record {
    uint32_t kind, pid, path, other, data;
    int32_t error;
    uint64_t offset;
};

static struct shared *shared;
static char root[PATH_MAX];
static size_t root_length;
static int log_fd = -1;
static __thread int depth;

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

__attribute__((constructor)) static void start(void) {
    const char *place = getenv("CRASH_ROOT"), *log = getenv("CRASH_LOG");
    const char *map = getenv("CRASH_SHARED");
    if (!place || !log || !map) return;
    int fd = syscall(SYS_openat, AT_FDCWD, map, O_RDWR | O_CLOEXEC, 0);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (shared == MAP_FAILED) abort();
    int32_t nobody = 0;
    if (__atomic_compare_exchange_n(&shared->state, &nobody, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&shared->lock, &attributes);
        __atomic_store_n(&shared->state, 2, __ATOMIC_SEQ_CST);
    }
    while (__atomic_load_n(&shared->state, __ATOMIC_SEQ_CST) != 2) usleep(100);
    root_length = snprintf(root, sizeof root, "%s", place);
    /* A high number, because shells and Python's own start use the low ones. */
    fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 700);
    syscall(SYS_close, fd);
}

/* Whether to log the path, which is made absolute in `found`. */
static int ours(int folder, const char *path, char *found) {
    if (log_fd < 0 || depth || !path) return 0;
    if (path[0] == '/') {
        snprintf(found, PATH_MAX, "%s", path);
    } else {
        char link[64];
        snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
        ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, found, PATH_MAX - 1);
        if (length < 0) return 0;
        if (path[0]) snprintf(found + length, PATH_MAX - length, "/%s", path);
        else found[length] = 0;
    }
    size_t length = strlen(found);
    while (length > 1 && found[length - 1] == '/') found[--length] = 0;
    return !strncmp(found, root, root_length) && (found[root_length] == '/' || !found[root_length]);
}
static int ours_open(int fd, char *found) {
    return fd >= 0 && ours(fd, "", found) && !strstr(found, " (deleted)");
}

static void begin(void) {
    depth++;
    if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD) pthread_mutex_consistent(&shared->lock);
}
static void note(uint32_t kind, const char *path, const char *other, uint64_t offset,
                 const struct iovec *data, int count, size_t length, int error) {
    struct record head = {kind, getpid(), strlen(path), other ? strlen(other) : 0, length, error, offset};
    struct iovec all[3] = {{&head, sizeof head}, {(void *)path, head.path}, {(void *)other, head.other}};
    syscall(SYS_writev, log_fd, all, 3);
    for (int i = 0; i < count && length; i++) {
        size_t part = data[i].iov_len < length ? data[i].iov_len : length;
        syscall(SYS_write, log_fd, data[i].iov_base, part);
        length -= part;
    }
}
static void end(void) {
    int kept = errno;
    pthread_mutex_unlock(&shared->lock);
    depth--;
    errno = kept;
}
/* Count this call; return whether it is to fail, with errno set. */
static int fails(uint32_t kind, const char *path) {
    /* This file is MLflow, on another machine (tests/support/memory_store.py). */
    if (!strcmp(path + root_length, "/mlflow")) return 0;
    uint64_t call = ++shared->calls;
    int later = shared->how == FROM_THEN_ON || (shared->how == SYNCS_FROM_THEN_ON && kind == SYNC);
    int hit = call == shared->fail_at || (later && shared->fail_at && call > shared->fail_at);
    if (!hit || shared->how == SHORT_WRITE) return 0;
    note(FAILED, path, NULL, kind, NULL, 0, 0, shared->error);
    errno = shared->error;
    return 1;
}

/* Run `call` unless it is to fail; note it with `arguments` if it succeeded. */
#define CHANGE(kind, path, type, failure, call, ...) ({ \
    type result_ = failure; \
    begin(); \
    if (!fails(kind, path)) { \
        result_ = call; \
        if (result_ != failure) note(kind, path, __VA_ARGS__, NULL, 0, 0, 0); \
    } \
    end(); \
    result_; })

static int opened(int folder, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    /* Every open for writing counts as a call that may fail, and only these change the folder. */
    if ((flags & (O_CREAT | O_TRUNC)) && ours(folder, path, full))
        return CHANGE(CREATE, full, int, -1, syscall(SYS_openat, folder, path, flags, mode), NULL,
                      !!(flags & O_TRUNC));
    return syscall(SYS_openat, folder, path, flags, mode);
}
#define MODE(last) ({ mode_t mode_ = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { va_list list; va_start(list, last); mode_ = va_arg(list, mode_t); va_end(list); } \
    mode_; })
int open(const char *path, int flags, ...) { return opened(AT_FDCWD, path, flags, MODE(flags)); }
int open64(const char *path, int flags, ...) { return opened(AT_FDCWD, path, flags | O_LARGEFILE, MODE(flags)); }
int openat(int folder, const char *path, int flags, ...) { return opened(folder, path, flags, MODE(flags)); }
int openat64(int folder, const char *path, int flags, ...) { return opened(folder, path, flags, MODE(flags)); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* C++ streams open with fopen, and then write with write and writev. */
static FILE *opened_stream(FILE *(*call)(const char *, const char *), const char *path, const char *mode) {
    char full[PATH_MAX];
    if (mode[0] == 'r' || !ours(AT_FDCWD, path, full)) return call(path, mode);
    return CHANGE(CREATE, full, FILE *, NULL, call(path, mode), NULL, mode[0] == 'w');
}
FILE *fopen(const char *path, const char *mode) { return opened_stream(REAL(fopen), path, mode); }
FILE *fopen64(const char *path, const char *mode) { return opened_stream(REAL(fopen64), path, mode); }

static ssize_t written(int fd, const struct iovec *parts, int count, off_t at) {
    char full[PATH_MAX];
    struct iovec first;
    if (!ours_open(fd, full))
        return at < 0 ? syscall(SYS_writev, fd, parts, count) : syscall(SYS_pwritev, fd, parts, count, at, 0);
    ssize_t result = -1;
    begin();
    uint64_t before = shared->calls;
    if (!fails(WRITE, full)) {
        if (shared->how == SHORT_WRITE && shared->calls == shared->fail_at && shared->calls > before) {
            note(FAILED, full, NULL, WRITE, NULL, 0, 0, 0);
            first = parts[0];
            first.iov_len = (first.iov_len + 1) / 2;
            parts = &first;
            count = 1;
        }
        result = at < 0 ? syscall(SYS_writev, fd, parts, count) : syscall(SYS_pwritev, fd, parts, count, at, 0);
        if (result > 0)
            note(WRITE, full, NULL, at < 0 ? lseek(fd, 0, SEEK_CUR) - result : at, parts, count, result, 0);
    }
    end();
    return result;
}
ssize_t write(int fd, const void *data, size_t length) {
    struct iovec part = {(void *)data, length};
    return written(fd, &part, 1, -1);
}
ssize_t writev(int fd, const struct iovec *parts, int count) { return written(fd, parts, count, -1); }
ssize_t pwrite(int fd, const void *data, size_t length, off_t at) {
    struct iovec part = {(void *)data, length};
    return written(fd, &part, 1, at);
}
ssize_t pwrite64(int fd, const void *data, size_t length, off_t at) { return pwrite(fd, data, length, at); }

static int synced(int fd, int (*call)(int)) {
    char full[PATH_MAX];
    if (!ours_open(fd, full)) return call(fd);
    return CHANGE(SYNC, full, int, -1, call(fd), NULL, 0);
}
int fsync(int fd) { return synced(fd, REAL(fsync)); }
int fdatasync(int fd) { return synced(fd, REAL(fdatasync)); }

int ftruncate(int fd, off_t length) {
    char full[PATH_MAX];
    if (!ours_open(fd, full)) return syscall(SYS_ftruncate, fd, length);
    return CHANGE(TRUNCATE, full, int, -1, syscall(SYS_ftruncate, fd, length), NULL, length);
}
int ftruncate64(int fd, off_t length) { return ftruncate(fd, length); }
int truncate(const char *path, off_t length) {
    char full[PATH_MAX];
    if (!ours(AT_FDCWD, path, full)) return syscall(SYS_truncate, path, length);
    return CHANGE(TRUNCATE, full, int, -1, syscall(SYS_truncate, path, length), NULL, length);
}
int truncate64(const char *path, off_t length) { return truncate(path, length); }

int renameat2(int from, const char *path, int to, const char *other, unsigned flags) {
    char full[PATH_MAX], target[PATH_MAX];
    if (!ours(from, path, full) || !ours(to, other, target))
        return syscall(SYS_renameat2, from, path, to, other, flags);
    return CHANGE(RENAME, full, int, -1, syscall(SYS_renameat2, from, path, to, other, flags), target, 0);
}
int rename(const char *path, const char *other) { return renameat2(AT_FDCWD, path, AT_FDCWD, other, 0); }
int renameat(int from, const char *path, int to, const char *other) { return renameat2(from, path, to, other, 0); }

int unlinkat(int folder, const char *path, int flags) {
    char full[PATH_MAX];
    if (!ours(folder, path, full)) return syscall(SYS_unlinkat, folder, path, flags);
    return CHANGE(UNLINK, full, int, -1, syscall(SYS_unlinkat, folder, path, flags), NULL, 0);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *path, mode_t mode) {
    char full[PATH_MAX];
    if (!ours(folder, path, full)) return syscall(SYS_mkdirat, folder, path, mode);
    return CHANGE(MKDIR, full, int, -1, syscall(SYS_mkdirat, folder, path, mode), NULL, 0);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int linkat(int from, const char *path, int to, const char *other, int flags) {
    char full[PATH_MAX], target[PATH_MAX];
    if (!ours(to, other, target) || !ours(from, path, full))
        return syscall(SYS_linkat, from, path, to, other, flags);
    return CHANGE(LINK, full, int, -1, syscall(SYS_linkat, from, path, to, other, flags), target, 0);
}
int link(const char *path, const char *other) { return linkat(AT_FDCWD, path, AT_FDCWD, other, 0); }
