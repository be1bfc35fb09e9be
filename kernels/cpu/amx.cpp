// Permission to use the matrix unit, whose registers Linux grants on request.

#include "amx.h"

#if OCTAVO_HAS_AMX

#include <sys/syscall.h>
#include <unistd.h>

extern "C" int octavo_allow_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
}

#endif
