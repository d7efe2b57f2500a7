/*
 * libhostcann_preload.so: lets the wheels run without root rights, without touching site-packages, and without sharing
 * names with another cluster on the same host. Fixed paths in the wheels are answered with ours:
 *
 *   realpath  /usr/local/Ascend/driver/version.info   $ASCEND_HOME_PATH/driver/version.info
 *   realpath  /etc/ascend_install.info                no such file: an installed driver is hidden
 *   dlopen    .../libmf_hybm_accoffload.so            $ASCEND_HOME_PATH/lib64/... (an NPU machine compiles it; a plain
 *                                                     wheel ships it empty)
 *   open, unlink  /dev/shm/memfabric_hybrid_N         $HOSTCANN_ROOT/pool/... (MemCache's memory, numbered by rank)
 *   open, unlink  /tmp/mmc_meta_service.lock          $HOSTCANN_ROOT/pool/... (one meta service per host otherwise)
 *
 * And the wheel's sleep of 1 us before it asks whether a copy is done, which Linux makes 60 us, is left out: an emulated
 * copy is done when its queue entry has been sent.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define INSTALL_INFO "/etc/ascend_install.info"
#define VERSION_INFO "/usr/local/Ascend/driver/version.info"
#define ACCOFFLOAD "/libmf_hybm_accoffload.so"
#define POOL_MEMORY "/dev/shm/memfabric_hybrid_"
#define META_LOCK "/tmp/mmc_meta_service.lock"

typedef char *realpath_function(const char *, char *);
typedef void *dlopen_function(const char *, int);
typedef int usleep_function(useconds_t);

static _Thread_local bool copies_are_done;

static int starts_with(const char *text, const char *start)
{
    return strncmp(text, start, strlen(start)) == 0;
}

static int ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), end_length = strlen(end);
    return length >= end_length && strcmp(text + length - end_length, end) == 0;
}

EXPORT char *realpath(const char *path, char *resolved)
{
    static realpath_function *original;
    if (original == NULL)
        original = (realpath_function *)dlsym(RTLD_NEXT, "realpath");
    const char *home = getenv("ASCEND_HOME_PATH");
    if (home == NULL || path == NULL)
        return original(path, resolved);
    if (strcmp(path, INSTALL_INFO) == 0) {
        errno = ENOENT;
        return NULL;
    }
    if (strcmp(path, VERSION_INFO) != 0)
        return original(path, resolved);
    char ours[PATH_MAX];
    snprintf(ours, sizeof ours, "%s/driver/version.info", home);
    return original(ours, resolved);
}

EXPORT char *__realpath_chk(const char *path, char *resolved, size_t resolved_length)
{
    if (resolved != NULL && resolved_length < PATH_MAX)
        abort(); /* as the fortified original does */
    return realpath(path, resolved);
}

/* Our kernel library for the wheel's, else the file itself. */
static const char *library_path(const char *file)
{
    static char ours[PATH_MAX];
    const char *home = getenv("ASCEND_HOME_PATH");
    if (file == NULL || home == NULL || !ends_with(file, ACCOFFLOAD))
        return file;
    snprintf(ours, sizeof ours, "%s/lib64" ACCOFFLOAD, home);
    return ours;
}

/* The call below must stay a tail call (it is built with -O2): dlopen searches the RUNPATH of whoever it returns to. */
EXPORT void *dlopen(const char *file, int mode)
{
    static dlopen_function *original;
    if (original == NULL)
        original = (dlopen_function *)dlsym(RTLD_NEXT, "dlopen");
    return original(library_path(file), mode);
}

/* This cluster's file for one of MemCache's host-wide ones, else the path itself. */
static const char *cluster_path(const char *path, char *ours)
{
    if (path == NULL || (!starts_with(path, POOL_MEMORY) && strcmp(path, META_LOCK) != 0))
        return path;
    const char *root = getenv("HOSTCANN_ROOT");
    if (root == NULL || *root == '\0')
        return path;
    mkdir(root, 0700); /* both may exist; open() tells if they cannot be used */
    snprintf(ours, PATH_MAX, "%s/pool", root);
    mkdir(ours, 0700);
    snprintf(ours, PATH_MAX, "%s/pool%s", root, strrchr(path, '/'));
    return ours;
}

EXPORT int open(const char *path, int flags, ...)
{
    mode_t mode = 0;
    if ((flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE) {
        va_list arguments;
        va_start(arguments, flags);
        mode = va_arg(arguments, mode_t);
        va_end(arguments);
    }
    char ours[PATH_MAX];
    return openat(AT_FDCWD, cluster_path(path, ours), flags, mode);
}

EXPORT int unlink(const char *path)
{
    char ours[PATH_MAX];
    return unlinkat(AT_FDCWD, cluster_path(path, ours), 0);
}

/* Called by libhostcann when this thread has sent entries to a queue. */
EXPORT void hostcann_copies_are_done(void)
{
    copies_are_done = true;
}

EXPORT int usleep(useconds_t microseconds)
{
    static usleep_function *original;
    if (original == NULL)
        original = (usleep_function *)dlsym(RTLD_NEXT, "usleep");
    bool needless = copies_are_done && microseconds <= 1;
    copies_are_done = false;
    return needless ? 0 : original(microseconds);
}
