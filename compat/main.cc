// cuda-checkpoint: a drop-in for NVIDIA's utility of that name.
#include "run.h"

int main(int argc, char** argv) { return stasis::compat::run(argc, argv); }
