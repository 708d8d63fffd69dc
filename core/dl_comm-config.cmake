# find_package(dl_comm) gives the target dl_comm::dl_comm.
get_filename_component(_dl_comm_dir "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
if(NOT TARGET dl_comm::dl_comm)
  add_library(dl_comm::dl_comm SHARED IMPORTED)
  set_target_properties(dl_comm::dl_comm PROPERTIES
    IMPORTED_LOCATION "${_dl_comm_dir}/libdl_comm.so.0"
    IMPORTED_SONAME libdl_comm.so.0
    INTERFACE_INCLUDE_DIRECTORIES "${_dl_comm_dir}/include"
    INTERFACE_LINK_OPTIONS "-Wl,--allow-shlib-undefined")
endif()
unset(_dl_comm_dir)
