# added to the tests of llama.cpp by the patch

llama_build(test-hwkv.cpp)
