// Threads of Python's that come back from C++ when the interpreter is ending.
#pragma once

namespace adaptra {

// Has such a thread rest for good, so that the process ends with the code of its main thread.
//
// A daemon thread that returns from C++ asks for the interpreter's lock, mostly in a destructor. Up to version 3.13 Python
// then ends the thread by pthread_exit. That unwinds the stack, which destructors don't permit, so std::terminate aborts the
// process. Later versions of Python have the thread rest too.
void rest_late_threads();

}  // namespace adaptra
