/* A libnvidia-ml for tests: answers from the file that FAKE_NVML names, read anew when it has changed.
   Lines "uuid power_mw energy_mj clock_mhz temp_c reasons limit_mw lost denied slow_ms unsupported num_processes".
   FAKE_NVML_UNSUPPORTED: functions (without nvmlDeviceGet) and field ids, each between commas, that no GPU supports.
   Compiled with OLD_DRIVER it lacks what drivers before R510 lack. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, SMALL = 7, LOST = 15 };
enum { UINT = 1, ULLONG = 3 };
typedef struct {
    char uuid[80];
    unsigned power_mw;
    unsigned long long energy_mj;
    unsigned clock_mhz, temp_c, reasons, limit_mw;
    int lost, denied, slow_ms, unsupported, num_processes;
} gpu;
static gpu gpus[16];
static int num_gpus;
static unsigned num_calls;

static void load(void) {
    static struct stat seen;
    struct stat now;
    gpu one;
    if (stat(getenv("FAKE_NVML"), &now) || (now.st_ino == seen.st_ino && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)) return;
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    seen = now;
    num_gpus = 0;
    while (file && num_gpus < 16 &&
           fscanf(file, "%79s %u %llu %u %u %u %u %d %d %d %d %d", one.uuid, &one.power_mw, &one.energy_mj, &one.clock_mhz,
                  &one.temp_c, &one.reasons, &one.limit_mw, &one.lost, &one.denied, &one.slow_ms, &one.unsupported,
                  &one.num_processes) == 12)
        gpus[num_gpus++] = one;
    if (file) fclose(file);
}
static int supports(const char *what) {
    char word[80];
    snprintf(word, sizeof word, ",%s,", what);
    const char *without = getenv("FAKE_NVML_UNSUPPORTED");
    return !without || !strstr(without, word);
}
static double seconds(void) { /* the counter grows as the power says */
    static double began;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!began) began = now.tv_sec + now.tv_nsec / 1e9;
    return now.tv_sec + now.tv_nsec / 1e9 - began;
}
#define GPU(what) gpu *one = handle; load(); if (one->lost) return LOST; if (!supports(what)) return NOT_SUPPORTED;

int nvmlInit_v2(void) { load(); return getenv("FAKE_NVML_NO_DRIVER") ? 9 : OK; }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : code == 9 ? "Driver Not Loaded" : "error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "1.0"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *num) { load(); *num = num_gpus; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned num, void **handle) { *handle = &gpus[num]; return OK; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { strcpy(text, ((gpu *)handle)->uuid); return OK; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { strcpy(text, "NVIDIA H100 80GB HBM3"); return OK; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *out) { GPU("PowerUsage"); *out = one->power_mw; return OK; }
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *out) {
    GPU("TotalEnergyConsumption");
    if (one->unsupported) return NOT_SUPPORTED;
    *out = one->energy_mj + (unsigned long long)(one->power_mw * seconds());
    return OK;
}
int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *out) { GPU("ClockInfo"); *out = kind == 1 ? one->clock_mhz : 2619; return OK; }
int nvmlDeviceGetMaxClockInfo(void *handle, int kind, unsigned *out) { GPU("MaxClockInfo"); *out = kind == 1 ? 1980 : 2619; return OK; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *out) { GPU("Temperature"); *out = one->temp_c; return OK; }
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *out) {
    GPU("UtilizationRates");
    usleep(one->slow_ms * 1000);
    if (one->denied) return NO_PERMISSION;
    out[0] = 97; out[1] = 40;
    return OK;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *out) {
    GPU("MemoryInfo"); out[0] = 80ull << 30; out[1] = 78ull << 30; out[2] = 2ull << 30; return OK;
}
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *out) { GPU("EnforcedPowerLimit"); *out = one->limit_mw; return OK; }
int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, unsigned long long *out) {
    GPU("TotalEccErrors"); *out = kind == 0 ? 3 : 0; return OK;
}
int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    GPU("RemappedRows"); *corrected = 1; *uncorrected = 1; *pending = *failed = 0; return OK;
}

typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
static int processes(gpu *one, unsigned *num, process *out) {
    if (one->num_processes == 0) { *num = 0; return OK; }
    if (!out) { *num = one->num_processes; return SMALL; }
    for (int i = 0; i < one->num_processes; i++) out[i] = (process){4000000 + i, 1 << 30, 0, 0};
    *num = one->num_processes;
    return OK;
}
#ifdef OLD_DRIVER
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *out) { GPU("CurrentClocksThrottleReasons"); *out = one->reasons; return OK; }
int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *num, process *out) { GPU("ComputeRunningProcesses"); return processes(one, num, out); }
#else
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *out) { GPU("CurrentClocksEventReasons"); *out = one->reasons; return OK; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *num, process *out) { GPU("ComputeRunningProcesses"); return processes(one, num, out); }
#endif

typedef struct { unsigned id, scope; long long when, latency; int kind, ret; union { unsigned u; unsigned long long ull; } value; } field;
int nvmlDeviceGetFieldValues(void *handle, int num, field *out) {
    GPU("FieldValues");
    num_calls++;
    for (int i = 0; i < num; i++) {
        char id[16];
        sprintf(id, "%u", out[i].id);
        out[i].ret = supports(id) ? OK : NOT_SUPPORTED;
        out[i].kind = UINT;
#ifdef OLD_DRIVER
        if (out[i].id > 180) { out[i].ret = INVALID; continue; }
#endif
        if (out[i].id == 185) out[i].value.u = one->power_mw - 1000;
        else if (out[i].id == 186) out[i].value.u = one->power_mw;
        else if (out[i].id == 82) out[i].value.u = one->temp_c + 10;
        else if (out[i].id == 197) out[i].value.u = 0xFFFFFFFFu - (5u << 20) + num_calls * (1u << 20); /* 32 bits: runs over */
        else if (out[i].id == 198) { out[i].kind = ULLONG; out[i].value.ull = (unsigned long long)num_calls << 20; }
        else out[i].ret = INVALID; /* no NVLink */
    }
    return OK;
}
