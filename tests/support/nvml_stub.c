/* A libnvidia-ml.so.1 that answers from its environment, for the real pynvml to talk to.
 *
 * A device is called gpu0, gpu1, ... or gpu0mig0, ...; it exists when nvmlDeviceGetUUID_<device> is set.
 * <function>_<device>, or else <function>, holds the answers to successive calls, separated by commas;
 * the last one stays. E<code> is an NVML error. No answer at all: not supported.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int nvmlReturn_t;
typedef struct { char name[16]; } Device;
typedef Device *nvmlDevice_t;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { CARDS = 8, INSTANCES = 8, KEYS = 512, LONGEST = 128 };

static Device devices[CARDS][INSTANCES + 1]; /* [card][0] is the card itself */
static struct { char key[LONGEST]; unsigned calls; } counted[KEYS];

static unsigned count_call(const char *key) {
    int i = 0;
    while (counted[i].key[0] && strcmp(counted[i].key, key)) i++;
    strcpy(counted[i].key, key);
    return counted[i].calls++;
}

/* The text that answers this call, copied to `answer`; an error of the script as its code. */
static nvmlReturn_t answer_to(const char *function, nvmlDevice_t device, char *answer, size_t size) {
    char key[LONGEST];
    snprintf(key, sizeof key, "%s_%s", function, device ? device->name : "");
    const char *script = getenv(key);
    if (!script) script = getenv(function);
    if (!script) return NOT_SUPPORTED;
    for (unsigned call = count_call(key); call > 0 && strchr(script, ','); call--) script = strchr(script, ',') + 1;
    size_t length = strcspn(script, ",");
    if (length + 1 > size) return INSUFFICIENT_SIZE;
    memcpy(answer, script, length);
    answer[length] = 0;
    return answer[0] == 'E' ? atoi(answer + 1) : SUCCESS;
}

static nvmlReturn_t number(const char *function, nvmlDevice_t device, unsigned long long *value) {
    char answer[LONGEST];
    nvmlReturn_t result = answer_to(function, device, answer, sizeof answer);
    if (result == SUCCESS) *value = strtoull(answer, NULL, 0);
    return result;
}

static nvmlReturn_t number32(const char *function, nvmlDevice_t device, unsigned *value) {
    unsigned long long wide = 0;
    nvmlReturn_t result = number(function, device, &wide);
    if (result == SUCCESS) *value = (unsigned)wide;
    return result;
}

static nvmlReturn_t handle_of(unsigned card, unsigned instance, nvmlDevice_t *device) {
    if (card >= CARDS || instance > INSTANCES) return INVALID_ARGUMENT;
    Device *found = &devices[card][instance];
    if (instance) snprintf(found->name, sizeof found->name, "gpu%umig%u", card, instance - 1);
    else snprintf(found->name, sizeof found->name, "gpu%u", card);
    char key[LONGEST];
    snprintf(key, sizeof key, "nvmlDeviceGetUUID_%s", found->name);
    if (!getenv(key)) return instance ? NOT_FOUND : INVALID_ARGUMENT;
    *device = found;
    return SUCCESS;
}

static unsigned card_of(nvmlDevice_t device) { return (unsigned)(device - &devices[0][0]) / (INSTANCES + 1); }

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    unsigned long long ignored;
    (void)flags;
    return getenv("nvmlInitWithFlags") ? number("nvmlInitWithFlags", NULL, &ignored) : SUCCESS;
}

nvmlReturn_t nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(nvmlReturn_t result) { (void)result; return "a stub's error"; }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    nvmlDevice_t ignored;
    for (*count = 0; handle_of(*count, 0, &ignored) == SUCCESS;) ++*count;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    unsigned long long ignored;
    nvmlReturn_t result = handle_of(index, 0, device);
    if (result == SUCCESS && getenv("nvmlDeviceGetHandleByIndex"))
        result = number("nvmlDeviceGetHandleByIndex", *device, &ignored);
    return result;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t card, unsigned index, nvmlDevice_t *device) {
    return handle_of(card_of(card), index + 1, device);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned size) {
    return answer_to("nvmlDeviceGetUUID", device, uuid, size);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned size) {
    return answer_to("nvmlDeviceGetName", device, name, size);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, unsigned long long memory[3]) {
    nvmlReturn_t result = number("nvmlDeviceGetMemoryInfo_total", device, &memory[0]);
    if (result == SUCCESS) result = number("nvmlDeviceGetMemoryInfo_free", device, &memory[1]);
    if (result == SUCCESS) memory[2] = memory[0] - memory[1];
    return result;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, unsigned rates[2]) {
    rates[1] = 0;
    return number32("nvmlDeviceGetUtilizationRates", device, &rates[0]);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *celsius) {
    return sensor ? INVALID_ARGUMENT : number32("nvmlDeviceGetTemperature", device, celsius);
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, int temperature[3]) {
    unsigned celsius;
    nvmlReturn_t result = number32("nvmlDeviceGetTemperatureV", device, &celsius);
    if (result == SUCCESS) temperature[2] = (int)celsius;
    return result;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned type, unsigned *megahertz) {
    return type == 1 ? number32("nvmlDeviceGetClockInfo", device, megahertz) : INVALID_ARGUMENT;
}

#define ANSWER32(function) \
    nvmlReturn_t function(nvmlDevice_t device, unsigned *value) { return number32(#function, device, value); }
#define ANSWER64(function) \
    nvmlReturn_t function(nvmlDevice_t device, unsigned long long *value) { return number(#function, device, value); }

ANSWER32(nvmlDeviceGetPowerUsage)
ANSWER32(nvmlDeviceGetEnforcedPowerLimit)
ANSWER32(nvmlDeviceGetMaxMigDeviceCount)
ANSWER32(nvmlDeviceGetGpuInstanceId)
ANSWER32(nvmlDeviceGetComputeInstanceId)
ANSWER64(nvmlDeviceGetTotalEnergyConsumption)
ANSWER64(nvmlDeviceGetCurrentClocksThrottleReasons)
#ifndef DRIVER_BEFORE_R535
ANSWER64(nvmlDeviceGetCurrentClocksEventReasons)
#endif
