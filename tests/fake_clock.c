/* Preloaded: adds the seconds that the file FAKE_CLOCK holds, of the time of day and of the monotonic clock, to what
   clock_gettime says.  "-10800 0" is a time of day that was set back by three hours. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *now) {
    long done = syscall(SYS_clock_gettime, id, now);
    if (done == 0 && (id == CLOCK_REALTIME || id == CLOCK_MONOTONIC)) {
        long wall_s = 0, monotonic_s = 0;
        const char *path = getenv("FAKE_CLOCK");
        FILE *file = path ? fopen(path, "r") : NULL;
        if (file) {
            if (fscanf(file, "%ld %ld", &wall_s, &monotonic_s) != 2) wall_s = monotonic_s = 0;
            fclose(file);
        }
        now->tv_sec += id == CLOCK_REALTIME ? wall_s : monotonic_s;
    }
    return (int)done;
}
