# Run by CPack when the files of all components lie in their folders: what distributions want of a package,
# and a plain `cmake --install` need not have.

# Of headers that are compiled in, whose licences want to be told.
set(compiled_in libcli11-dev libexpected-dev libfmt-dev libkainjow-mustache-dev libprotozero-dev libxxhash-dev
    nlohmann-json3-dev)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status ERROR_VARIABLE said)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command} ended with ${status}: ${said}")
  endif()
endfunction()

set(licences "")
foreach(package IN LISTS compiled_in)
  if(EXISTS /usr/share/doc/${package}/copyright)
    file(READ /usr/share/doc/${package}/copyright text)
    string(APPEND licences "==== ${package}\n${text}\n")
  endif()
endforeach()

file(GLOB folders ${CPACK_TEMPORARY_DIRECTORY}/*/usr)
foreach(folder IN LISTS folders)
  get_filename_component(component ${folder} DIRECTORY)
  get_filename_component(component ${component} NAME)
  string(TOUPPER ${component} upper)
  if(CPACK_GENERATOR STREQUAL DEB)
    set(package ${CPACK_DEBIAN_${upper}_PACKAGE_NAME})
  else()
    set(package ${CPACK_RPM_${upper}_PACKAGE_NAME})
  endif()
  set(doc ${folder}/share/doc/${package})

  file(GLOB pages ${folder}/share/man/man*/*)
  foreach(page IN LISTS pages)
    run(gzip -9nf ${page})
  endforeach()

  file(MAKE_DIRECTORY ${doc})
  if(CPACK_GENERATOR STREQUAL DEB)
    file(REMOVE ${doc}/LICENSE)
    file(COPY_FILE ${CMAKE_CURRENT_LIST_DIR}/debian/copyright ${doc}/copyright)
    file(COPY_FILE ${CMAKE_CURRENT_LIST_DIR}/debian/changelog ${doc}/changelog.Debian)
    run(gzip -9nf ${doc}/changelog.Debian)
  elseif(NOT component STREQUAL criu_plugin)
    file(COPY_FILE ${CPACK_RESOURCE_FILE_LICENSE} ${doc}/LICENSE)
  elseif(EXISTS /usr/share/common-licenses/GPL-2)
    file(COPY_FILE /usr/share/common-licenses/GPL-2 ${doc}/COPYING)
  endif()
  if(NOT component MATCHES "^(dev|python)$" AND licences)
    file(WRITE ${doc}/compiled-in-licences.txt "${licences}")
    run(gzip -9nf ${doc}/compiled-in-licences.txt)
  endif()

  # CMake has not made this one: python/build-package. Below /usr the system finds libstasis by itself.
  file(GLOB_RECURSE extensions ${folder}/lib/python3/*/_stasis*.so)
  foreach(extension IN LISTS extensions)
    file(RPATH_REMOVE FILE ${extension})
    run(strip --strip-unneeded --remove-section=.comment ${extension})
    file(CHMOD ${extension} PERMISSIONS OWNER_READ OWNER_WRITE GROUP_READ WORLD_READ)
  endforeach()
endforeach()
