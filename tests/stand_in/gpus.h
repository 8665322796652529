/* The machine that is played: lines "UUID key=value ..." of the file that STAND_IN_GPUS names, read anew when it has changed. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define KEYS(KEY) KEY(power_mw) KEY(energy_mj) KEY(clock_mhz) KEY(max_clock_mhz) KEY(temp_c) KEY(reasons) KEY(limit_mw) KEY(lost) \
    KEY(denied) KEY(slow_ms) KEY(num_processes) KEY(memory_mib) KEY(others_mib) KEY(ecc_uncorrected) KEY(mig) \
    KEY(xid) KEY(cuda_error) KEY(nccl_error) KEY(capability) KEY(hang)
typedef struct {
    char uuid[80];
#define KEY(name) unsigned long long name;
    KEYS(KEY)
#undef KEY
} gpu_line;
static gpu_line gpu_lines[16];
static int num_lines;

static void read_gpus(void) {
    static struct stat seen;
    struct stat now;
    const char *path = getenv("STAND_IN_GPUS");
    if (!path || stat(path, &now) || (now.st_ino == seen.st_ino && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)) return;
    FILE *file = fopen(path, "r");
    char text[2000], *word, *rest;
    seen = now;
    num_lines = 0;
    while (file && num_lines < 16 && fgets(text, sizeof text, file)) {
        gpu_line *line = &gpu_lines[num_lines++];
        memset(line, 0, sizeof *line);
        snprintf(line->uuid, sizeof line->uuid, "%s", strtok_r(text, " \n", &rest));
        while ((word = strtok_r(NULL, " \n", &rest))) {
            char *value = strchr(word, '=');
            *value++ = 0;
#define KEY(name) if (!strcmp(word, #name)) line->name = strtoull(value, NULL, 10);
            KEYS(KEY)
#undef KEY
        }
    }
    if (file) fclose(file);
}
