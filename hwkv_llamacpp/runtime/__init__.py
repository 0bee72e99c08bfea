"""The built llama.cpp, driven: its library, its bindings, its server."""
