"""A disk that stops to answer: operations on files of a folder wait while a file exists."""

from __future__ import annotations

from pathlib import Path

from tests.kit.preloaded import preloaded_library

# Memory maps are not held. What they read is in the page cache, as long as memory suffices.
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void wait_while(const char *variable) {
    const char *file = getenv(variable);
    while (file && access(file, F_OK) == 0) usleep(20000);
}

static int is_frozen(void) {
    const char *file = getenv("FROZEN_FILE");
    return file && access(file, F_OK) == 0;
}

static void hold_path(const char *path) {
    const char *folder = getenv("FROZEN_FOLDER");
    if (is_frozen() && folder && strncmp(path, folder, strlen(folder)) == 0)
        wait_while("FROZEN_FILE");
}

static void hold(int fd) {
    char link[64], path[PATH_MAX];
    if (!is_frozen()) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    hold_path(path);
}

#define ORIGINAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t read(int fd, void *data, size_t size) {
    hold(fd);
    return ORIGINAL(read)(fd, data, size);
}
ssize_t write(int fd, const void *data, size_t size) {
    hold(fd);
    return ORIGINAL(write)(fd, data, size);
}
ssize_t pread(int fd, void *data, size_t size, off_t at) {
    hold(fd);
    return ORIGINAL(pread)(fd, data, size, at);
}
ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    hold(fd);
    return ORIGINAL(pread64)(fd, data, size, at);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    hold(fd);
    return ORIGINAL(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    hold(fd);
    return ORIGINAL(pwrite64)(fd, data, size, at);
}
int ftruncate64(int fd, off64_t size) {
    hold(fd);
    return ORIGINAL(ftruncate64)(fd, size);
}
int fsync(int fd) {
    wait_while("FROZEN_SYNC_FILE");
    hold(fd);
    return ORIGINAL(fsync)(fd);
}
int fdatasync(int fd) {
    wait_while("FROZEN_SYNC_FILE");
    hold(fd);
    return ORIGINAL(fdatasync)(fd);
}

#define OPEN(name)                                   \
    int name(const char *path, int flags, ...) {     \
        va_list arguments;                           \
        va_start(arguments, flags);                  \
        int mode = va_arg(arguments, int);           \
        va_end(arguments);                           \
        hold_path(path);                             \
        return ORIGINAL(name)(path, flags, mode);    \
    }
OPEN(open)
OPEN(open64)
"""


class FreezableDisks:
    """The disks of processes, by the index of the process. Their folders are those of Replicas."""

    def __init__(self, folder: Path) -> None:
        """Compile the library that holds operations in a folder of the test."""
        self._folder = folder
        self._preload = preloaded_library(folder, _SOURCE)

    def env(self, i: int) -> dict[str, str]:
        """Return the variables of a process."""
        return {
            **self._preload,
            "FROZEN_FOLDER": str(self._folder / f"data-{i}"),
            "FROZEN_FILE": str(self._file(i, only_sync=False)),
            "FROZEN_SYNC_FILE": str(self._file(i, only_sync=True)),
        }

    def freeze(self, i: int, *, only_sync: bool = False) -> None:
        """Let reads and writes of a process wait, or only the synchronization of writes."""
        self._file(i, only_sync).touch()

    def thaw(self, i: int) -> None:
        """Let everything go on."""
        for only_sync in (False, True):
            self._file(i, only_sync).unlink(missing_ok=True)

    def _file(self, i: int, only_sync: bool) -> Path:
        return self._folder / f"frozen-{i}-{'sync' if only_sync else 'all'}"
