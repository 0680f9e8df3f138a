# Included by the presets right after project(): compiles through ccache where it is installed.
if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(STASIS_CCACHE ccache)
  if(STASIS_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${STASIS_CCACHE})
  endif()
endif()
