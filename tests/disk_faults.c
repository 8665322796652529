/* Fails the n-th operation on files below one folder:  gcc -shared -fPIC -O2 -o disk_faults.so disk_faults.c -ldl

LD_PRELOAD it.  Processes inherit it and share one counter, so n counts the operations of a whole command.
    DISK_FAULT_BELOW    the folder; operations elsewhere are not counted
    DISK_FAULT_STATE    a file outside of it, 16 zero bytes at first: how many operations there were, whether space was freed;
                        STATE.log gets a line for each that failed (n=0: for each): its number, the process, its name, the path
    DISK_FAULT_AT       n, from 1; 0: only count
    DISK_FAULT_KIND     enospc, eio       this one operation fails so
                        full              this and all later ones that need space, until a .reserve is removed
                        short             a write takes half of its bytes; other operations are as ever
                        lost              a write says that it wrote, and did not: no program can survive this; it proves that
                                          what looks for losses finds them
                        crash, torn       SIGKILL in place of the operation; torn: a write writes half of its bytes before
Operations: open to write or create, write, pwrite, writev, sendfile, copy_file_range, fsync, fdatasync, ftruncate, rename,
link, symlink, mkdir, unlink, rmdir.  Linux, glibc. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PASS = 0, HALF = 1, LOST = 2, FAIL = -1 }; /* what becomes of an operation */
enum { NEEDS_SPACE = 1, WRITES = 2 };

struct state {
    long count, freed;
};

static struct state *state;
static char below[PATH_MAX];
static size_t below_len;
static long at;
static const char *kind = "";

/* As the library is loaded, and called in a process that was forked and gets other variables. */
__attribute__((constructor)) void of_variables(void) {
    const char *folder = getenv("DISK_FAULT_BELOW"), *path = getenv("DISK_FAULT_STATE");
    state = NULL;
    if (!folder || !path || !realpath(folder, below)) return;
    below_len = strlen(below);
    at = atol(getenv("DISK_FAULT_AT") ? getenv("DISK_FAULT_AT") : "0");
    kind = getenv("DISK_FAULT_KIND") ? getenv("DISK_FAULT_KIND") : "";
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *found = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (found != MAP_FAILED) state = found;
}

/* The absolute path, as far as it can be known without resolving links; 0: it is not in the folder. */
static int inside(int dir_fd, const char *path, char *whole) {
    char link[64];
    whole[0] = 0;
    if (!state || !path) return 0;
    if (path[0] != '/') {
        if (dir_fd == AT_FDCWD) {
            if (syscall(SYS_getcwd, whole, PATH_MAX) < 0) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", dir_fd);
            ssize_t len = syscall(SYS_readlinkat, AT_FDCWD, link, whole, PATH_MAX - 1);
            if (len < 0) return 0;
            whole[len] = 0;
        }
        if (path[0]) {
            strncat(whole, "/", PATH_MAX - strlen(whole) - 1);
            strncat(whole, path, PATH_MAX - strlen(whole) - 1);
        }
    } else {
        strncpy(whole, path, PATH_MAX - 1);
        whole[PATH_MAX - 1] = 0;
    }
    return !strncmp(whole, below, below_len) && (whole[below_len] == '/' || !whole[below_len]);
}

static void note(long number, const char *what, const char *path) {
    char name[PATH_MAX], line[2 * PATH_MAX], words[256] = "";
    snprintf(name, sizeof name, "%s.log", getenv("DISK_FAULT_STATE"));
    int fd = syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY);
    if (fd >= 0) {
        ssize_t len = syscall(SYS_read, fd, words, sizeof words - 1);
        for (ssize_t i = 0; i < len - 1; i++)
            if (!words[i] || words[i] == '\n') words[i] = ' ';
        syscall(SYS_close, fd);
    }
    int len = snprintf(line, sizeof line, "%ld\t%.120s\t%s\t%s\n", number, words, what, path + below_len);
    fd = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (fd < 0) return;
    syscall(SYS_write, fd, line, len);
    syscall(SYS_close, fd);
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* Counts one operation, and decides. */
static int decide(int dir_fd, const char *path, const char *what, int needs) {
    char whole[PATH_MAX];
    int before = errno;
    if (!inside(dir_fd, path, whole)) return errno = before, PASS;
    long number = __atomic_add_fetch(&state->count, 1, __ATOMIC_SEQ_CST);
    const char *name = strrchr(whole, '/');
    if (!strcmp(what, "unlink") && name && !strcmp(name, "/.reserve")) state->freed = 1;
    if (at == 0) note(number, what, whole);
    errno = before;
    if (at == 0 || number < at) return PASS;
    int is_full = !strcmp(kind, "full");
    if (is_full ? state->freed || !(needs & NEEDS_SPACE) : number != at) return PASS;
    if (number == at || is_full) note(number, what, whole);
    if (!strcmp(kind, "crash")) die();
    if (!strcmp(kind, "torn")) return (needs & WRITES) ? HALF : (die(), FAIL);
    if (!strcmp(kind, "short")) return (needs & WRITES) ? HALF : PASS;
    if (!strcmp(kind, "lost")) return (needs & WRITES) ? LOST : PASS;
    if (!strcmp(kind, "enospc") && !(needs & NEEDS_SPACE)) return PASS;
    errno = strcmp(kind, "eio") ? ENOSPC : EIO;
    return FAIL;
}

static int decide_fd(int fd, const char *what, int needs) {
    return state ? decide(fd, "", what, needs) : PASS;
}

static ssize_t after(ssize_t done) {
    if (!strcmp(kind, "torn")) die();
    return done;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define HALVED(n) ((n) > 1 ? (n) / 2 : (n))

static int opens(int dir_fd, const char *path, int flags) {
    if (!(flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))) return PASS;
    return decide(dir_fd, path, "open", NEEDS_SPACE);
}

#define OPEN(name)                                                              \
    int name(const char *path, int flags, ...) {                                \
        va_list more;                                                           \
        va_start(more, flags);                                                  \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                           \
        return opens(AT_FDCWD, path, flags) ? -1 : REAL(name)(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                            \
    int name(int dir_fd, const char *path, int flags, ...) {                    \
        va_list more;                                                           \
        va_start(more, flags);                                                  \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                           \
        return opens(dir_fd, path, flags) ? -1 : REAL(name)(dir_fd, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                             \
    FILE *name(const char *path, const char *mode) {                            \
        int flags = strpbrk(mode, "wa+") ? O_WRONLY | O_CREAT : O_RDONLY;       \
        return opens(AT_FDCWD, path, flags) ? NULL : REAL(name)(path, mode);    \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int fd, const void *data, size_t n) {
    switch (decide_fd(fd, "write", NEEDS_SPACE | WRITES)) {
    case FAIL: return -1;
    case LOST: return n;
    case HALF: return after(REAL(write)(fd, data, HALVED(n)));
    default: return REAL(write)(fd, data, n);
    }
}

#define PWRITE(name, off)                                                       \
    ssize_t name(int fd, const void *data, size_t n, off at_byte) {             \
        switch (decide_fd(fd, "pwrite", NEEDS_SPACE | WRITES)) {                \
        case FAIL: return -1;                                                   \
        case HALF: return after(REAL(name)(fd, data, HALVED(n), at_byte));      \
        default: return REAL(name)(fd, data, n, at_byte);                       \
        }                                                                       \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int fd, const struct iovec *parts, int n) {
    switch (decide_fd(fd, "writev", NEEDS_SPACE | WRITES)) {
    case FAIL: return -1;
    case HALF: return after(REAL(write)(fd, parts[0].iov_base, HALVED(parts[0].iov_len)));
    default: return REAL(writev)(fd, parts, n);
    }
}

#define SENDFILE(name, off)                                                     \
    ssize_t name(int out, int in, off *offset, size_t n) {                      \
        switch (decide_fd(out, "sendfile", NEEDS_SPACE | WRITES)) {             \
        case FAIL: return -1;                                                   \
        case HALF: return after(REAL(name)(out, in, offset, n > 64 ? 64 : HALVED(n))); \
        default: return REAL(name)(out, in, offset, n);                         \
        }                                                                       \
    }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

ssize_t copy_file_range(int in, off64_t *in_at, int out, off64_t *out_at, size_t n, unsigned flags) {
    switch (decide_fd(out, "copy_file_range", NEEDS_SPACE | WRITES)) {
    case FAIL: return -1;
    case HALF: return after(REAL(copy_file_range)(in, in_at, out, out_at, n > 64 ? 64 : HALVED(n), flags));
    default: return REAL(copy_file_range)(in, in_at, out, out_at, n, flags);
    }
}

int fsync(int fd) { return decide_fd(fd, "fsync", NEEDS_SPACE) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return decide_fd(fd, "fdatasync", NEEDS_SPACE) ? -1 : REAL(fdatasync)(fd); }
int ftruncate(int fd, off_t n) { return decide_fd(fd, "ftruncate", 0) ? -1 : REAL(ftruncate)(fd, n); }
int ftruncate64(int fd, off64_t n) { return decide_fd(fd, "ftruncate", 0) ? -1 : REAL(ftruncate64)(fd, n); }
int mkdir(const char *path, mode_t mode) {
    return decide(AT_FDCWD, path, "mkdir", NEEDS_SPACE) ? -1 : REAL(mkdir)(path, mode);
}
int mkdirat(int dir_fd, const char *path, mode_t mode) {
    return decide(dir_fd, path, "mkdir", NEEDS_SPACE) ? -1 : REAL(mkdirat)(dir_fd, path, mode);
}
int unlink(const char *path) { return decide(AT_FDCWD, path, "unlink", 0) ? -1 : REAL(unlink)(path); }
int unlinkat(int dir_fd, const char *path, int flags) {
    return decide(dir_fd, path, "unlink", 0) ? -1 : REAL(unlinkat)(dir_fd, path, flags);
}
int rmdir(const char *path) { return decide(AT_FDCWD, path, "rmdir", 0) ? -1 : REAL(rmdir)(path); }
int rename(const char *from, const char *to) {
    return decide(AT_FDCWD, to, "rename", NEEDS_SPACE) ? -1 : REAL(rename)(from, to);
}
int renameat(int from_fd, const char *from, int to_fd, const char *to) {
    return decide(to_fd, to, "rename", NEEDS_SPACE) ? -1 : REAL(renameat)(from_fd, from, to_fd, to);
}
int link(const char *from, const char *to) {
    return decide(AT_FDCWD, to, "link", NEEDS_SPACE) ? -1 : REAL(link)(from, to);
}
int linkat(int from_fd, const char *from, int to_fd, const char *to, int flags) {
    return decide(to_fd, to, "link", NEEDS_SPACE) ? -1 : REAL(linkat)(from_fd, from, to_fd, to, flags);
}
int symlink(const char *from, const char *to) {
    return decide(AT_FDCWD, to, "symlink", NEEDS_SPACE) ? -1 : REAL(symlink)(from, to);
}
int symlinkat(const char *from, int to_fd, const char *to) {
    return decide(to_fd, to, "symlink", NEEDS_SPACE) ? -1 : REAL(symlinkat)(from, to_fd, to);
}
