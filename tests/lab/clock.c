/* Preloaded into every program of a container (its /etc/ld.so.preload): its wall clock is OFFSET seconds off, and so
 * are the times of files as they are told, as on a machine whose clock is wrong. Durations are left alone.
 * Built at need with gcc or tcc, without headers: -DOFFSET=600 -DNR_CLOCK=228 (clock_gettime) -DNR_STATX=332 ...
 */
typedef long word;
extern word syscall(word number, ...);

struct span { word sec, nsec; };
struct stamp { word sec; unsigned nsec; int pad; };           /* of statx */

int clock_gettime(int clock, struct span *now)
{
    int rc = (int)syscall(NR_CLOCK, (word)clock, now);
    if (rc == 0 && (clock == 0 || clock == 5))                 /* REALTIME and its coarse form */
        now->sec += OFFSET;
    return rc;
}

int gettimeofday(struct span *now, void *zone)
{
    struct span got;
    (void)zone;
    clock_gettime(0, &got);
    if (now) {
        now->sec = got.sec;
        now->nsec = got.nsec / 1000;
    }
    return 0;
}

word time(word *where)
{
    struct span got;
    clock_gettime(0, &got);
    if (where)
        *where = got.sec;
    return got.sec;
}

int statx(int folder, const char *path, int flags, unsigned mask, void *result)
{
    int rc = (int)syscall(NR_STATX, (word)folder, path, (word)flags, (word)mask, result);
    if (rc == 0)
        for (int at = 64; at <= 112; at += 16)                 /* atime, btime, ctime, mtime */
            ((struct stamp *)((char *)result + at))->sec += OFFSET;
    return rc;
}

int fstatat(int folder, const char *path, void *result, int flags)
{
    int rc = (int)syscall(NR_FSTATAT, (word)folder, path, result, (word)flags);
    if (rc == 0)
        for (int at = 72; at <= 104; at += 16)                 /* atime, mtime, ctime */
            *(word *)((char *)result + at) += OFFSET;
    return rc;
}

int stat(const char *path, void *result) { return fstatat(-100, path, result, 0); }
int lstat(const char *path, void *result) { return fstatat(-100, path, result, 0x100); }
int fstat(int fd, void *result) { return fstatat(fd, "", result, 0x1000); }
int fstatat64(int folder, const char *path, void *result, int flags) { return fstatat(folder, path, result, flags); }
int stat64(const char *path, void *result) { return fstatat(-100, path, result, 0); }
int lstat64(const char *path, void *result) { return fstatat(-100, path, result, 0x100); }
int fstat64(int fd, void *result) { return fstatat(fd, "", result, 0x1000); }
