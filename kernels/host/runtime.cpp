// The runtime's one compilation unit: inlining across its parts is worth more than separate builds.
#include "collectives.h"
#include "context_switch.h"
#include "faults.h"
#include "launch.h"
#include "sanitizer_hooks.h"
#include "scheduler.h"
#include "traffic.h"
