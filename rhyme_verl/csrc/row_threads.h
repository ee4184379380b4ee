// Spreads the rows of a batch over a pool of threads, and waits for the last row.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace rhyme {

class RowThreads {
  public:
    // `num_threads` includes the calling thread.
    explicit RowThreads(int num_threads) {
        workers_.reserve(static_cast<size_t>(std::max(0, num_threads - 1)));
        try {
            while (workers_.size() < workers_.capacity()) workers_.emplace_back([this] { serve(); });
        } catch (const std::system_error&) {
            workers_.shrink_to_fit();  // no more threads can be started; continue with those that run
        }
    }

    ~RowThreads() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    // Calls work(row) once for every row below `count`, concurrently and in any order, and returns when all calls have
    // returned. `work` must not throw.
    void run(size_t count, const std::function<void(size_t)>& work) {
        if (workers_.empty() || count < kLeastRows) {
            for (size_t row = 0; row < count; ++row) work(row);
            return;
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            work_ = &work;
            count_ = count;
            next_ = 0;
            ++round_;
        }
        wake_.notify_all();
        take_rows(work, count);
        std::unique_lock<std::mutex> lock(mutex_);
        work_ = nullptr;  // a worker that wakes too late for this round keeps waiting
        done_.wait(lock, [this] { return num_running_ == 0; });
    }

  private:
    static constexpr size_t kLeastRows = 48;  // with fewer rows, waking the threads takes longer than they save

    void serve() {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return stop_ || (work_ && round_ != seen); });
            if (stop_) return;
            seen = round_;
            const std::function<void(size_t)>& work = *work_;
            const size_t count = count_;
            ++num_running_;
            lock.unlock();
            take_rows(work, count);
            lock.lock();
            if (--num_running_ == 0) done_.notify_one();
        }
    }

    void take_rows(const std::function<void(size_t)>& work, size_t count) {
        for (size_t row = next_++; row < count; row = next_++) work(row);
    }

    std::mutex mutex_;  // guards the members below, except next_ and workers_
    std::condition_variable wake_, done_;
    const std::function<void(size_t)>* work_ = nullptr;  // the caller's, valid during run(); null between rounds
    size_t count_ = 0;
    size_t num_running_ = 0;  // workers that are in the present round
    uint64_t round_ = 0;
    bool stop_ = false;
    std::atomic<size_t> next_{0};
    std::vector<std::thread> workers_;
};

}  // namespace rhyme
