// Threads of the OpenMP runtime that torch has loaded.
//
// They are started by `GOMP_parallel`, which the runtimes of GNU, LLVM and Intel all have. g++ -fopenmp calls it as
// well; clang++ -fopenmp would call functions that GNU's does not have. The library is linked to no runtime: a second
// one would have a second pool of threads.
#pragma once
#include <ATen/Parallel.h>

extern "C" {
void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_num_threads();
int omp_get_thread_num();
}

namespace vicinal {

// Calls f(worker) for all workers, in as many threads if torch has so many. f must not throw.
template <class F> void run_workers(int64_t workers, const F& f) {
  struct Team {
    int64_t workers;
    const F& f;
  } team{workers, f};
  if (workers == 1 || at::in_parallel_region()) {
    for (int64_t worker = 0; worker < workers; ++worker) f(worker);
    return;
  }
  const auto run = [](void* data) {
    const Team& team = *static_cast<const Team*>(data);
    for (int64_t worker = omp_get_thread_num(); worker < team.workers; worker += omp_get_num_threads()) team.f(worker);
  };
  GOMP_parallel(run, &team, 0, 0);  // 0: as many threads as torch has set; GNU's pool is made anew for other numbers
}

}  // namespace vicinal
