#include "schedule/types.h"
