# How CPack makes the packages: Debian's and RPM's, one for each component.
set(CPACK_PACKAGE_NAME stasis)
set(CPACK_PACKAGE_VENDOR "Stasis developers")
# As devscripts take it from the environment; a package that is for one machine names its user.
if(STASIS_MAINTAINER)
  set(CPACK_PACKAGE_CONTACT "${STASIS_MAINTAINER}")
elseif(DEFINED ENV{DEBEMAIL} AND DEFINED ENV{DEBFULLNAME})
  set(CPACK_PACKAGE_CONTACT "$ENV{DEBFULLNAME} <$ENV{DEBEMAIL}>")
else()
  cmake_host_system_information(RESULT host QUERY FQDN)
  set(CPACK_PACKAGE_CONTACT "Stasis developers <root@${host}>")
endif()
if(STASIS_HOMEPAGE)
  set(CPACK_PACKAGE_HOMEPAGE_URL "${STASIS_HOMEPAGE}")
endif()
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_RESOURCE_FILE_LICENSE ${CMAKE_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_GENERATOR DEB)
set(CPACK_MONOLITHIC_INSTALL OFF)
set(CPACK_COMPONENTS_GROUPING IGNORE)
# Ubuntu's and Debian's are 0022; a umask of the one who packs must not get into the packages.
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE
                                                WORLD_READ WORLD_EXECUTE)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_CURRENT_SOURCE_DIR}/as_packages_have_it.cmake)

set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
if(CMAKE_BUILD_TYPE STREQUAL Debug) # for tests, and large
  set(CPACK_DEBIAN_COMPRESSION_TYPE none)
endif()
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_BINARY_DIR}/lib)
set(CPACK_DEBIAN_PACKAGE_SECTION admin)
set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(CPACK_RPM_COMPONENT_INSTALL ON)
set(CPACK_RPM_FILE_NAME RPM-DEFAULT)
set(CPACK_RPM_PACKAGE_RELEASE 1)
set(CPACK_RPM_PACKAGE_LICENSE MIT)
set(CPACK_RPM_PACKAGE_GROUP "System Environment/Base")
# The folders that belong to others.
set(CPACK_RPM_EXCLUDE_FROM_AUTO_FILELIST_ADDITION
    /usr/lib/criu /usr/lib64/cmake /usr/lib64/pkgconfig /usr/share/bash-completion /usr/share/bash-completion/completions
    /usr/share/fish /usr/share/fish/vendor_completions.d /usr/share/zsh /usr/share/zsh/site-functions
    /usr/share/man /usr/share/man/man1 /usr/share/man/man5 /usr/lib/systemd /usr/lib/systemd/system)
# What lies in folders of its own is for us alone, and the simulator must not count as the driver.
# Stripped by CPack; what else RPM would do (debug packages, compression of man pages) expects its own build.
set(CPACK_RPM_SPEC_MORE_DEFINE
    "%define __os_install_post %{nil}\n%define debug_package %{nil}\n%define _build_id_links none
%define __provides_exclude_from ^/usr/lib/(stasis|criu)/")

set(exactly "${PROJECT_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE}")
set(CPACK_COMPONENTS_ALL "")

# stasis_package(COMPONENT NAME SUMMARY TEXT)
macro(stasis_package component name summary text)
  list(APPEND CPACK_COMPONENTS_ALL ${component})
  string(TOUPPER ${component} upper)
  set(CPACK_COMPONENT_${upper}_DESCRIPTION "${text}")
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${name})
  set(CPACK_DEBIAN_${upper}_DESCRIPTION "${summary}\n${text}")
  set(CPACK_RPM_${upper}_PACKAGE_NAME ${name})
  set(CPACK_RPM_${upper}_FILE_NAME ${name}-${PROJECT_VERSION}-${CPACK_RPM_PACKAGE_RELEASE}.x86_64.rpm)
  set(CPACK_RPM_${upper}_PACKAGE_SUMMARY "${summary}")
  set(CPACK_RPM_${upper}_PACKAGE_DESCRIPTION "${text}")
endmacro()

stasis_package(stasis stasis "transparent checkpoint and restore of running CUDA programs"
"Suspends a running CUDA program to free its GPU, saves it to disk, and brings
it back later, on the same GPU or another one. The program is not changed.
This package has the command stasis, the library libstasis and the agent that
'stasis run' loads into programs. NVIDIA's driver 570 or newer is needed, and
CRIU 4.0 or newer for saving to disk.")
set(CPACK_DEBIAN_STASIS_PACKAGE_RECOMMENDS "criu (>= 4.0)")
set(CPACK_DEBIAN_STASIS_PACKAGE_SUGGESTS "stasis-criu-plugin, python3-stasis, stasis-simulator")
set(CPACK_DEBIAN_STASIS_PACKAGE_CONTROL_EXTRA ${CMAKE_CURRENT_SOURCE_DIR}/debian/shlibs
                                              ${CMAKE_CURRENT_SOURCE_DIR}/debian/triggers)
set(CPACK_RPM_STASIS_PACKAGE_SUGGESTS "criu >= 4.0")

stasis_package(cuda_checkpoint stasis-cuda-checkpoint "drop-in replacement for NVIDIA's cuda-checkpoint utility"
"Locks, checkpoints, restores and unlocks the CUDA state of one process. It has
the options, output and exit status of NVIDIA's utility of the same name, and
says what is wrong and what to do when something fails.")
set(CPACK_DEBIAN_CUDA_CHECKPOINT_PACKAGE_PROVIDES cuda-checkpoint)
set(CPACK_DEBIAN_CUDA_CHECKPOINT_PACKAGE_CONFLICTS cuda-checkpoint)
set(CPACK_DEBIAN_CUDA_CHECKPOINT_PACKAGE_REPLACES cuda-checkpoint)
set(CPACK_DEBIAN_CUDA_CHECKPOINT_PACKAGE_SUGGESTS stasis)
set(CPACK_RPM_CUDA_CHECKPOINT_PACKAGE_PROVIDES cuda-checkpoint)
set(CPACK_RPM_CUDA_CHECKPOINT_PACKAGE_CONFLICTS cuda-checkpoint)

stasis_package(dev libstasis-dev "development files of libstasis"
"The header stasis/stasis.h (C and C++), and what CMake's find_package(stasis)
and pkg-config read, for programs that suspend, save and restore CUDA programs
by libstasis.")
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "stasis (= ${exactly})")
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_SHLIBDEPS OFF)
set(CPACK_RPM_DEV_PACKAGE_NAME libstasis-devel)
set(CPACK_RPM_DEV_FILE_NAME libstasis-devel-${PROJECT_VERSION}-${CPACK_RPM_PACKAGE_RELEASE}.x86_64.rpm)
set(CPACK_RPM_DEV_PACKAGE_REQUIRES "stasis = ${PROJECT_VERSION}-${CPACK_RPM_PACKAGE_RELEASE}")

stasis_package(simulator stasis-simulator "simulated CUDA driver, to try and to test Stasis without a GPU"
"A libcuda.so.1 of our own, which programs find only when they are told to
(/usr/lib/stasis/sim), a program that counts in GPU memory, a tool that shows
the simulated GPUs, and a demo of Stasis: /usr/share/stasis/tools/demo.")
set(CPACK_DEBIAN_SIMULATOR_PACKAGE_DEPENDS "stasis (= ${exactly})")
set(CPACK_DEBIAN_SIMULATOR_PACKAGE_SUGGESTS stasis-cuda-checkpoint)
set(CPACK_RPM_SIMULATOR_PACKAGE_REQUIRES "stasis = ${PROJECT_VERSION}-${CPACK_RPM_PACKAGE_RELEASE}")

if(TARGET cuda_plugin)
  stasis_package(criu_plugin stasis-criu-plugin "plugin for CRIU, to save and restore programs that use CUDA"
"With it plain 'criu dump' and 'criu restore', and container engines that call
them, save and bring back programs that use CUDA, and leave none stuck. It
takes the place of CRIU's own cuda_plugin.so, and needs CRIU 4.0 or newer.")
  set(CPACK_DEBIAN_CRIU_PLUGIN_PACKAGE_RECOMMENDS "criu (>= 4.0)")
  set(CPACK_DEBIAN_CRIU_PLUGIN_PACKAGE_SUGGESTS stasis)
  set(CPACK_DEBIAN_CRIU_PLUGIN_PACKAGE_PROVIDES criu-cuda-plugin)
  set(CPACK_DEBIAN_CRIU_PLUGIN_PACKAGE_CONFLICTS criu-cuda-plugin)
  set(CPACK_DEBIAN_CRIU_PLUGIN_PACKAGE_REPLACES criu-cuda-plugin)
  set(CPACK_RPM_CRIU_PLUGIN_PACKAGE_SUGGESTS "criu >= 4.0, stasis")
  # Fedora's package of CRIU's own.
  set(CPACK_RPM_CRIU_PLUGIN_PACKAGE_CONFLICTS criu-cuda-plugin)
endif()

# One for each Slurm: on whatever system, it fits the Slurm of the machine that it was made on alone.
if(TARGET stasis_spank AND STASIS_SLURM_FROM)
  stasis_package(slurm_plugin stasis-slurm-plugin "plugin for Slurm, to save jobs and let them go on"
"Gives sbatch, srun and salloc the options --stasis-images, --stasis-every and
--stasis-grace: a job is saved while it runs and when it has to make room, and
goes on on whichever node it gets. It is in force once plugstack.conf of Slurm
names /usr/lib/stasis/slurm/stasis.so.")
  string(CONCAT slurm "slurmd (>= ${STASIS_SLURM_FROM}) | slurm-client (>= ${STASIS_SLURM_FROM}), "
                      "slurmd (<< ${STASIS_SLURM_BELOW}~) | slurm-client (<< ${STASIS_SLURM_BELOW}~)")
  set(CPACK_DEBIAN_SLURM_PLUGIN_PACKAGE_DEPENDS "stasis (= ${exactly}), ${slurm}")
  # EPEL's and SchedMD's packages are called so.
  set(CPACK_RPM_SLURM_PLUGIN_PACKAGE_REQUIRES
      "stasis = ${PROJECT_VERSION}-${CPACK_RPM_PACKAGE_RELEASE}, slurm >= ${STASIS_SLURM_FROM}, slurm < ${STASIS_SLURM_BELOW}")
endif()

# One for each Python: there is no package of it for RPM, whose distributions have other Pythons than this
# machine; python/build-package makes it there.
if(TARGET python_package)
  stasis_package(python python3-stasis "checkpoint and restore of running CUDA programs from Python"
"The package stasis: single processes with the names of NVIDIA's
cuda.core.checkpoint, whole procedures (suspend, resume, dump, restore) with
progress, context managers and an exception for each error.")
  execute_process(COMMAND ${PYTHON3} -c "import sys; print('%d.%d;%d.%d' % (*sys.version_info[:2], sys.version_info[0], sys.version_info[1] + 1))"
                  OUTPUT_VARIABLE versions OUTPUT_STRIP_TRAILING_WHITESPACE)
  list(GET versions 0 this)
  list(GET versions 1 next)
  set(CPACK_DEBIAN_PYTHON_PACKAGE_SECTION python)
  set(CPACK_DEBIAN_PYTHON_PACKAGE_DEPENDS "stasis (= ${exactly}), python3 (>= ${this}), python3 (<< ${next})")
  set(CPACK_DEBIAN_PYTHON_PACKAGE_CONTROL_EXTRA ${CMAKE_CURRENT_SOURCE_DIR}/debian/postinst
                                                ${CMAKE_CURRENT_SOURCE_DIR}/debian/prerm)
endif()

include(CPack)
