/* A libnvidia-ml for tests: answers from the file that FAKE_NVML names, read anew when it is another file (it is
   replaced, never written in place).
   Lines "uuid power_mw energy_mj clock_mhz temp_c reasons limit_mw lost denied slow_ms unsupported num_processes". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, SMALL = 7, LOST = 15 };
typedef struct {
    char uuid[80];
    unsigned power_mw;
    unsigned long long energy_mj;
    unsigned clock_mhz, temp_c, reasons, limit_mw;
    int lost, denied, slow_ms, unsupported, num_processes;
} gpu;
static gpu gpus[16];
static int num_gpus, num_calls;

static void load(void) {
    static ino_t seen;
    struct stat now;
    if (stat(getenv("FAKE_NVML"), &now) == 0) {
        if (now.st_ino == seen) return;
        seen = now.st_ino;
    }
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    gpu one;
    num_gpus = 0;
    while (file && num_gpus < 16 &&
           fscanf(file, "%79s %u %llu %u %u %u %u %d %d %d %d %d", one.uuid, &one.power_mw, &one.energy_mj, &one.clock_mhz,
                  &one.temp_c, &one.reasons, &one.limit_mw, &one.lost, &one.denied, &one.slow_ms, &one.unsupported,
                  &one.num_processes) == 12)
        gpus[num_gpus++] = one;
    if (file) fclose(file);
}
static int state(gpu *one) { return one->lost ? LOST : OK; }
static double seconds(void) { /* the counter grows as the power says */
    static double began;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!began) began = now.tv_sec + now.tv_nsec / 1e9;
    return now.tv_sec + now.tv_nsec / 1e9 - began;
}
#define GPU gpu *one = handle; load(); if (state(one)) return state(one);

int nvmlInit_v2(void) { load(); return getenv("FAKE_NVML_NO_DRIVER") ? 9 : OK; }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : code == 9 ? "Driver Not Loaded" : "error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "1.0"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *num) { load(); *num = num_gpus; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned num, void **handle) { *handle = &gpus[num]; return OK; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { strcpy(text, ((gpu *)handle)->uuid); return OK; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *out) { GPU; usleep(one->slow_ms * 1000); *out = one->power_mw; return OK; }
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *out) {
    GPU; if (one->unsupported) return NOT_SUPPORTED; *out = one->energy_mj + (unsigned long long)(one->power_mw * seconds()); return OK;
}
int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *out) { GPU; *out = kind == 1 ? one->clock_mhz : 2619; return OK; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *out) { GPU; *out = one->temp_c; return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *out) { GPU; *out = one->reasons; return OK; }
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *out) {
    GPU; if (one->denied) return NO_PERMISSION; out[0] = 97; out[1] = 40; return OK;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *out) {
    GPU; out[0] = 80ull << 30; out[1] = 78ull << 30; out[2] = 2ull << 30; return OK;
}
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *out) { GPU; *out = one->limit_mw; return OK; }
int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, unsigned long long *out) { GPU; *out = 0; return OK; }
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *num, process *out) {
    GPU;
    if (one->num_processes == 0) { *num = 0; return OK; }
    if (!out) { *num = one->num_processes; return SMALL; }
    for (int i = 0; i < one->num_processes; i++) out[i] = (process){4000000 + i, 1 << 30, 0, 0};
    *num = one->num_processes;
    return OK;
}
typedef struct { unsigned id, scope; long long when, latency; int kind, ret; union { unsigned u; unsigned long long ull; } value; } field;
int nvmlDeviceGetFieldValues(void *handle, int num, field *out) {
    GPU;
    num_calls++;
    for (int i = 0; i < num; i++) {
        out[i].ret = OK;
        if (out[i].id == 186) out[i].value.u = one->power_mw + 1000;
        else if (out[i].id == 197 || out[i].id == 198) out[i].value.ull = (unsigned long long)num_calls << 20;
        else out[i].ret = INVALID; /* no NVLink */
    }
    return OK;
}
