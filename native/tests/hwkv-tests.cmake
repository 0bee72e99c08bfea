# added to the tests of llama.cpp by the patch

# without llama-common, so that a sanitized build stays small
add_executable(test-hwkv test-hwkv.cpp)
target_link_libraries(test-hwkv PRIVATE llama)
