/* A libnvidia-ml for tests: it answers for the machine of gpus.h.
   STAND_IN_UNSUPPORTED: functions (without nvmlDeviceGet) and field ids, each between commas, that no GPU supports.
   Processes on a GPU: those that cuda.py notes in STAND_IN_GPUS.processes, and num_processes that are none of ours.
   Compiled with OLD_DRIVER it lacks what drivers before R510 lack. */
#include "gpus.h"
#include <dirent.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, SMALL = 7, TIMEOUT = 10, LOST = 15 };
enum { UINT = 1, ULLONG = 3 };
typedef gpu_line gpu;
static unsigned num_calls;
static void load(void) { read_gpus(); }
static int supports(const char *what) {
    char word[80];
    snprintf(word, sizeof word, ",%s,", what);
    const char *without = getenv("STAND_IN_UNSUPPORTED");
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

int nvmlInit_v2(void) { load(); return getenv("STAND_IN_NO_DRIVER") ? 9 : OK; }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : code == NOT_FOUND ? "Not Found" : code == 9 ? "Driver Not Loaded" : "error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "1.0"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned *num) { load(); *num = num_lines; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned num, void **handle) { *handle = &gpu_lines[num]; return OK; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) { /* a MIG slice is called MIG-UUID of its GPU */
    load();
    for (int num = 0; num < num_lines; num++)
        if (strstr(uuid, gpu_lines[num].uuid)) { *handle = &gpu_lines[num]; return OK; }
    return NOT_FOUND;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **out) { *out = handle; return OK; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { strcpy(text, ((gpu *)handle)->uuid); return OK; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { strcpy(text, "NVIDIA H100 80GB HBM3"); return OK; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *out) { GPU("PowerUsage"); *out = one->power_mw; return OK; }
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *out) {
    GPU("TotalEnergyConsumption");
    *out = one->energy_mj + (unsigned long long)(one->power_mw * seconds());
    return OK;
}
int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *out) { GPU("ClockInfo"); *out = kind == 1 ? one->clock_mhz : 2619; return OK; }
int nvmlDeviceGetMaxClockInfo(void *handle, int kind, unsigned *out) { GPU("MaxClockInfo"); *out = kind == 1 ? one->max_clock_mhz : 2619; return OK; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *out) { GPU("Temperature"); *out = one->temp_c; return OK; }
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *out) {
    GPU("UtilizationRates");
    usleep(one->slow_ms * 1000);
    if (one->denied) return NO_PERMISSION;
    out[0] = 97; out[1] = 40;
    return OK;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *out) {
    GPU("MemoryInfo"); out[0] = one->memory_mib << 20; out[2] = one->others_mib << 20; out[1] = out[0] - out[2]; return OK;
}
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *out) { GPU("EnforcedPowerLimit"); *out = one->limit_mw; return OK; }
int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, unsigned long long *out) {
    GPU("TotalEccErrors"); *out = kind == 0 ? 3 : one->ecc_uncorrected; return OK;
}
int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    GPU("RemappedRows"); *corrected = 1; *uncorrected = 1; *pending = *failed = 0; return OK;
}

typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
static int processes(gpu *one, unsigned *num, process *out) {
    char path[1000];
    unsigned room = *num;
    *num = 0;
    snprintf(path, sizeof path, "%s.processes", getenv("STAND_IN_GPUS"));
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        char *dot = strrchr(entry->d_name, '.');
        unsigned pid = dot ? atoi(dot + 1) : 0;
        if (!pid || strncmp(entry->d_name, one->uuid, dot - entry->d_name) || kill(pid, 0)) continue;
        if (out && *num < room) out[*num] = (process){pid, 1 << 30, 0, 0};
        ++*num;
    }
    if (folder) closedir(folder);
    for (unsigned long long i = 0; i < one->num_processes; i++, ++*num)
        if (out && *num < room) out[*num] = (process){4000000 + i, 1 << 30, 0, 0};
    return *num && (!out || room < *num) ? SMALL : OK;
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
        else out[i].ret = INVALID;
    }
    return OK;
}

#define ONE(name, type, expression) int nvmlDeviceGet##name(void *handle, type *out) { GPU(#name); *out = expression; return OK; }
#define TWO(name, first, second) int nvmlDeviceGet##name(void *handle, unsigned *a, unsigned *b) { GPU(#name); *a = first; *b = second; return OK; }
TWO(EccMode, 1, 1)
TWO(MigMode, one->mig, one->mig)
TWO(CudaComputeCapability, one->capability / 10, one->capability % 10)
ONE(PersistenceMode, unsigned, 1)
ONE(PowerManagementLimit, unsigned, one->limit_mw)
ONE(PowerManagementDefaultLimit, unsigned, 700000)
ONE(CurrPcieLinkGeneration, unsigned, 5)
ONE(MaxPcieLinkGeneration, unsigned, 5)
ONE(CurrPcieLinkWidth, unsigned, 16)
ONE(MaxPcieLinkWidth, unsigned, 16)
int nvmlDeviceGetApplicationsClock(void *handle, int kind, unsigned *out) { GPU("ApplicationsClock"); *out = kind == 1 ? one->max_clock_mhz : 2619; return OK; }

/* Events: a GPU whose xid is not 0 has one, once for each set. */
typedef struct { gpu *watched[16]; int num; unsigned long long said[16]; } events;
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } event;
int nvmlEventSetCreate(events **set) { *set = calloc(1, sizeof **set); return OK; }
int nvmlEventSetFree(events *set) { free(set); return OK; }
int nvmlDeviceGetSupportedEventTypes(void *handle, unsigned long long *out) { GPU("SupportedEventTypes"); *out = 8; return OK; }
int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, events *set) { GPU("RegisterEvents"); set->watched[set->num++] = one; return OK; }
int nvmlEventSetWait_v2(events *set, event *out, unsigned timeout_ms) {
    load();
    for (int num = 0; num < set->num; num++) {
        unsigned long long xid = set->watched[num]->xid;
        if (xid == set->said[num]) continue;
        set->said[num] = xid;
        if (!xid) continue;
        *out = (event){set->watched[num], 8, xid, 0, 0};
        return OK;
    }
    return TIMEOUT;
}
