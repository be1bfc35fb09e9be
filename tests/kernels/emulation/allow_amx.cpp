// The matrix unit is emulated, so no system needs to be asked for it.
extern "C" int octavo_allow_amx() { return 1; }
