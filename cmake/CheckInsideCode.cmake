# The code that runs inside targets (src/attach/inside_code.cc) must not need a linker or a loader: fails the build if its
# section has relocations. By READELF, of LIBRARY.
execute_process(COMMAND ${READELF} --wide --relocs ${LIBRARY} OUTPUT_VARIABLE listed RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${READELF} cannot read ${LIBRARY}")
endif()
if(listed MATCHES "\\.rela?stasis_inside")
  message(FATAL_ERROR "the code that runs inside targets has relocations: see `readelf --relocs ${LIBRARY}`")
endif()
execute_process(COMMAND ${READELF} --wide --sections ${LIBRARY} OUTPUT_VARIABLE listed)
if(NOT listed MATCHES " stasis_inside +PROGBITS")
  message(FATAL_ERROR "the code that runs inside targets is not in its section")
endif()
