// Says from which sources the library was built, so that one older than its Python half is not called.

#ifndef FUNCTRAIN_SOURCES
#define FUNCTRAIN_SOURCES ""
#endif

extern "C" const char* functrain_sources() { return FUNCTRAIN_SOURCES; }

extern "C" int functrain_has_openmp() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
