/* cddp_backend.cpp - cddp as an engine of torch.distributed: a c10d::Backend for CPU tensors.

     python3 examples/torch/cddp_torch.py       builds it: 1 minute, once for a version of PyTorch

   cddp_torch.py registers the engine as "cddp". For dist.all_reduce(tensor) PyTorch then calls
   CddpBackend::allreduce below, and so on. Such a method starts operations of cddp on the tensors'
   memory, each with a handle, and returns a Work:
     work.wait()        cddp_wait, which runs the operation on the calling thread if it can
     work.get_future()  a new thread waits, and completes the future: DDP asks for futures
   What PyTorch offers and cddp lacks is refused, with a text that names it. */
#define CDDP_IMPLEMENTATION
#define CDDP_STATIC        /* the functions of cddp stay in this library */
#define CDDP_NO_CALL_SITES /* error texts do not show lines of this file */
#include "../../cddp.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>
#include <pybind11/chrono.h>
#include <list>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

using namespace c10d;
using c10::intrusive_ptr;
using c10::ivalue::Future;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>; /* a list of tensors for each input or output */
using Counts = std::vector<size_t>; /* elements for each rank */
using Rows = std::vector<int64_t>;
using Milliseconds = std::chrono::milliseconds;
#define REFUSE(...) C10_THROW_ERROR(NotImplementedError, c10::str("cddp lacks ", __VA_ARGS__))
#define FAIL(...) C10_THROW_ERROR(DistBackendError, c10::str(__VA_ARGS__))
/* Programs look for gloo's words "Timed out". */
static std::string text_of(cddp_result r) {
  return c10::str(r == CDDP_TIMEOUT ? "cddp: Timed out (" : "cddp: (", cddp_error(), ")");
}
static void check(cddp_result r) {
  if (r != CDDP_OK) FAIL(text_of(r));
}

/* --- tensors --- */

/* A tensor's elements, for cddp. */
struct Array {
  void *data;
  size_t count;
  cddp_dtype dtype;
};
static const std::map<at::ScalarType, cddp_dtype> types = {
    {at::kFloat, CDDP_F32}, {at::kDouble, CDDP_F64}, {at::kHalf, CDDP_F16},
    {at::kBFloat16, CDDP_BF16}, {at::kChar, CDDP_I8}, {at::kByte, CDDP_U8},
    {at::kBool, CDDP_U8}, {at::kInt, CDDP_I32}, {at::kLong, CDDP_I64}};

/* A type that cddp lacks (complex, i16, f8) is moved as bytes, and cannot be reduced. */
static Array array_of(const at::Tensor &t) {
  auto found = types.find(t.scalar_type());
  if (found == types.end()) return {t.data_ptr(), t.nbytes(), CDDP_U8};
  return {t.data_ptr(), (size_t)t.numel(), found->second};
}

/* PyTorch's operations and cddp's have the same order. A bool is a byte that is 0 or 1: a sum is
   its maximum, a product its minimum. */
static cddp_op op_of(const ReduceOp &op, const at::Tensor &t) {
  static_assert((int)ReduceOp::AVG == CDDP_AVG && (int)ReduceOp::BXOR == CDDP_BXOR, "order");
  bool is_bool = t.scalar_type() == at::kBool;
  if (types.count(t.scalar_type()) == 0) REFUSE("reductions of ", t.scalar_type());
  if (op.op_ > ReduceOp::BXOR) REFUSE("ReduceOp.PREMUL_SUM");
  if (op.op_ == ReduceOp::AVG && is_bool) REFUSE("ReduceOp.AVG of bool");
  if (!is_bool) return (cddp_op)op.op_;
  if (op.op_ == ReduceOp::SUM) return CDDP_MAX;
  return op.op_ == ReduceOp::PRODUCT ? CDDP_MIN : (cddp_op)op.op_;
}

static void require_same_type(const at::Tensor &a, const at::Tensor &b) {
  if (a.scalar_type() != b.scalar_type())
    FAIL("cddp: ", a.scalar_type(), " and ", b.scalar_type(), " in one operation");
}

static at::Tensor concatenate(const Tensors &parts) {
  Tensors rows;
  for (const at::Tensor &t : parts) {
    require_same_type(t, parts[0]);
    rows.push_back(t.reshape({-1}));
  }
  return at::cat(rows);
}

static int64_t sum(const Rows &sizes) { return std::accumulate(sizes.begin(), sizes.end(), 0L); }
static bool equal_sizes(const Tensors &tensors) {
  auto as_first = [&](const at::Tensor &t) { return t.numel() == tensors[0].numel(); };
  return std::all_of(tensors.begin(), tensors.end(), as_first);
}
static Counts counts_of(const Tensors &tensors) {
  Counts counts;
  for (const at::Tensor &t : tensors) counts.push_back(array_of(t).count);
  return counts;
}

/* --- work --- */

/* One call of PyTorch: operations of cddp, and copies when all of them are complete. */
class CddpWork : public Work {
 public:
  using Work::Work;
  ~CddpWork() override { end(); }

  /* The backend fills these in, before another thread knows of this object. */
  std::list<cddp_work *> handles;            /* a list: its elements keep their addresses */
  std::vector<std::function<void()>> copies; /* from buffers to PyTorch's tensors */
  Tensors kept;                              /* cddp uses their memory */
  Tensors outputs;
  bool has_future = true;

  cddp_work **handle() { return &handles.emplace_back(nullptr); }

  /* The tensor's memory, or a copy without gaps in C's order of dimensions. */
  Array read(const at::Tensor &t) {
    if (!t.is_cpu() || t.is_sparse()) REFUSE("this call for a tensor on ", t.device(), t.layout());
    kept.push_back(t.contiguous());
    return array_of(kept.back());
  }
  /* The same for a tensor that cddp writes to: a copy is copied back. */
  Array write(at::Tensor t) {
    Array a = read(t);
    at::Tensor row = kept.back();
    if (!row.is_same(t)) copies.push_back([t, row]() mutable { t.copy_(row); });
    return a;
  }
  /* A buffer of all outputs, one after the other. */
  Array buffer(const Tensors &tensors, const at::Tensor &input) {
    Rows sizes;
    for (const at::Tensor &t : tensors) {
      require_same_type(t, input);
      sizes.push_back(t.numel());
    }
    at::Tensor row = at::empty({sum(sizes)}, input.options());
    copies.push_back([row, tensors, sizes] {
      Tensors parts = row.split_with_sizes(sizes);
      for (size_t i = 0; i < parts.size(); i++) tensors[i].copy_(parts[i].view_as(tensors[i]));
    });
    return array_of(row);
  }

  bool wait(Milliseconds timeout) override {
    std::unique_lock<std::timed_mutex> lock(waiting_, std::defer_lock);
    if (timeout == kNoTimeout) lock.lock();
    else if (!lock.try_lock_for(timeout)) FAIL("cddp: Timed out after ", timeout.count(), " ms");
    finish_handles(timeout);
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }
  bool isCompleted() override {
    std::unique_lock<std::timed_mutex> lock(waiting_, std::try_to_lock);
    if (!lock.owns_lock() || ended()) return ended();
    bool done = true;
    for (cddp_work *w : handles)
      if (w != nullptr && cddp_test(w, &done) == CDDP_OK && !done) return false;
    finish_handles(kNoTimeout);
    return true;
  }
  bool ended() { return Work::isCompleted(); } /* and all results are in place */
  Tensors result() override { return outputs; }
  int sourceRank() const override { return source_; }

  intrusive_ptr<Future> getFuture() override {
    if (!has_future) REFUSE("futures of send and recv");
    std::call_once(asked_, [this] {
      future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
      auto self = intrusive_ptr<CddpWork>::unsafe_reclaim_from_nonowning(this);
      std::thread([self] { self->complete_future(); }).detach();
    });
    return future_;
  }
  /* The group ends: cancels receives, and waits for everything else. */
  void end() {
    std::lock_guard<std::timed_mutex> lock(waiting_);
    for (cddp_work *w : handles)
      if (w != nullptr && cddp_cancel(w) != CDDP_OK) (void)cddp_wait(w);
    handles.clear();
    auto why = std::make_exception_ptr(std::runtime_error("cddp: the group was destroyed"));
    if (!ended()) finish(why);
  }

 private:
  void complete_future() {
    try {
      wait(std::chrono::hours(9999)); /* with a limit cddp's own thread works: it polls less */
      future_->markCompleted(c10::IValue(outputs));
    } catch (...) {
      future_->setError(std::current_exception());
    }
  }

  /* Waits in the order of the calls. The first error is the work's. waiting_ is locked. */
  void finish_handles(Milliseconds timeout) {
    if (ended()) return;
    bool limited = timeout != kNoTimeout, done = false;
    std::exception_ptr error;
    for (cddp_work *&w : handles) {
      if (w == nullptr) continue;
      cddp_result r = limited ? cddp_wait_for(w, (double)timeout.count() / 1e3) : cddp_wait(w);
      if (limited && r == CDDP_TIMEOUT) { /* the limit of this call; it can have finished since */
        if (cddp_test(w, &done) != CDDP_OK || !done) check(r);
        r = cddp_wait(w);
      }
      w = nullptr;
      source_ = cddp_source();
      if (r != CDDP_OK && !error) error = std::make_exception_ptr(std::runtime_error(text_of(r)));
    }
    for (auto &copy : copies)
      if (!error) copy();
    copies.clear();
    kept.clear();
    finish(error);
  }
  std::timed_mutex waiting_; /* one thread at a time waits for the handles */
  std::once_flag asked_;     /* for the future */
  intrusive_ptr<Future> future_;
  int source_ = -1;
};
using WorkPointer = intrusive_ptr<CddpWork>;

/* --- the backend --- */

class CddpBackend : public Backend {
  using Result = intrusive_ptr<Work>;

 public:
  CddpBackend(const std::string &init_method, const std::string &secret, int rank, int size,
              std::chrono::duration<float> timeout)
      : Backend(rank, size), timeout_(std::chrono::duration_cast<Milliseconds>(timeout)) {
    cddp_group_desc desc = {init_method.c_str(), nullptr, nullptr, rank, size};
    desc.timeout_s = (double)timeout.count();
    desc.secret = secret.c_str();
    check(cddp_init(&group_, &desc));
  }
  ~CddpBackend() override {
    if (getpid() != creator_) return; /* a forked child: the group is its parent's */
    std::optional<py::gil_scoped_release> without_gil; /* callbacks of futures can need it */
    if (Py_IsInitialized() && PyGILState_Check()) without_gil.emplace();
    for (WorkPointer &work : works_) work->end();
    cddp_destroy(group_);
  }
  const std::string getBackendName() const override { return "cddp"; }
  void setSequenceNumberForGroup() override {} /* begins at 0 on all ranks */
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  Result allreduce(Tensors &tensors, const AllreduceOptions &opts) override {
    if (tensors.at(0).is_sparse()) return sum_sparse(tensors, opts.reduceOp);
    return start(OpType::ALLREDUCE, "cddp:all_reduce", tensors, [&](CddpWork &w) {
      for (const at::Tensor &t : tensors) {
        Array a = w.write(t);
        cddp_op op = op_of(opts.reduceOp, t);
        check(cddp_all_reduce(group_, a.data, a.count, a.dtype, op, w.handle()));
      }
    });
  }
  Result allreduce_coalesced(Tensors &t, const AllreduceCoalescedOptions &opts) override {
    return allreduce(t, opts);
  }
  Result reduce(Tensors &tensors, const ReduceOptions &opts) override {
    return start(OpType::REDUCE, "cddp:reduce", tensors, [&](CddpWork &w) {
      int root = (int)opts.rootRank;
      cddp_op op = op_of(opts.reduceOp, tensors.at(0));
      Array a = root == rank_ ? w.write(tensors[0]) : w.read(tensors[0]);
      check(cddp_reduce(group_, a.data, a.count, a.dtype, op, root, w.handle()));
    });
  }
  Result reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                         const ReduceScatterOptions &opts) override {
    return start(OpType::_REDUCE_SCATTER_BASE, "cddp:reduce_scatter", outputs, [&](CddpWork &w) {
      for (size_t i = 0; i < outputs.size(); i++) {
        require_parts(inputs.at(i), outputs[i]);
        Array in = w.read(inputs[i]), out = w.write(outputs[i]);
        cddp_op op = op_of(opts.reduceOp, inputs[i]);
        check(cddp_reduce_scatter(group_, in.data, out.data, out.count, out.dtype, op, w.handle()));
      }
    });
  }
  Result _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                              const ReduceScatterOptions &opts) override {
    Tensors outputs = {output}, inputs = {input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  Result reduce_scatter(Tensors &outputs, Lists &inputs,
                        const ReduceScatterOptions &opts) override {
    if (!equal_sizes(inputs.at(0))) REFUSE("reduce_scatter of unequal parts");
    at::Tensor input = concatenate(inputs[0]);
    return _reduce_scatter_base(outputs.at(0), input, opts);
  }
  Result broadcast(Tensors &tensors, const BroadcastOptions &opts) override {
    return start(OpType::BROADCAST, "cddp:broadcast", tensors, [&](CddpWork &w) {
      int root = (int)opts.rootRank;
      Array a = root == rank_ ? w.read(tensors.at(0)) : w.write(tensors.at(0));
      check(cddp_broadcast(group_, a.data, a.count, a.dtype, root, w.handle()));
    });
  }
  Result allgather(Lists &outputs, Tensors &inputs, const AllgatherOptions &) override {
    return start(OpType::ALLGATHER, "cddp:all_gather", outputs.at(0),
                 [&](CddpWork &w) { gather_all(w, outputs[0], inputs.at(0)); });
  }
  Result allgather_coalesced(Lists &outputs, Tensors &inputs, const AllgatherOptions &) override {
    return start(OpType::ALLGATHER_COALESCED, "cddp:all_gather", inputs, [&](CddpWork &w) {
      for (size_t i = 0; i < inputs.size(); i++) {
        Tensors of_all_ranks;
        for (const Tensors &of_rank : outputs) of_all_ranks.push_back(of_rank.at(i));
        gather_all(w, of_all_ranks, inputs[i]);
      }
    });
  }
  Result allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                         const AllgatherOptions &) override {
    return start(OpType::_ALLGATHER_BASE, "cddp:all_gather", outputs, [&](CddpWork &w) {
      for (size_t i = 0; i < outputs.size(); i++) {
        require_parts(outputs[i], inputs.at(i));
        Array in = w.read(inputs[i]), out = w.write(outputs[i]);
        check(cddp_all_gather(group_, in.data, out.data, in.count, in.dtype, w.handle()));
      }
    });
  }
  Result _allgather_base(at::Tensor &output, at::Tensor &input,
                         const AllgatherOptions &opts) override {
    Tensors outputs = {output}, inputs = {input};
    return allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  Result gather(Lists &outputs, Tensors &inputs, const GatherOptions &opts) override {
    Tensors all = opts.rootRank == rank_ ? outputs.at(0) : Tensors();
    return start(OpType::GATHER, "cddp:gather", all, [&](CddpWork &w) {
      Array in = w.read(inputs.at(0)), out = w.buffer(all, inputs[0]);
      int root = (int)opts.rootRank;
      if (root == rank_ && out.count != in.count * size_) FAIL("cddp: gather of unequal sizes");
      check(cddp_gather(group_, in.data, out.data, in.count, in.dtype, root, w.handle()));
    });
  }
  Result scatter(Tensors &outputs, Lists &inputs, const ScatterOptions &opts) override {
    return start(OpType::SCATTER, "cddp:scatter", outputs, [&](CddpWork &w) {
      int root = (int)opts.rootRank;
      at::Tensor parts = root == rank_ ? concatenate(inputs.at(0)) : at::Tensor();
      if (root == rank_) require_parts(parts, outputs.at(0));
      Array in = root == rank_ ? w.read(parts) : Array(), out = w.write(outputs.at(0));
      check(cddp_scatter(group_, in.data, out.data, out.count, out.dtype, root, w.handle()));
    });
  }
  Result alltoall(Tensors &outputs, Tensors &inputs, const AllToAllOptions &) override {
    return start(OpType::ALLTOALL, "cddp:all_to_all", outputs, [&](CddpWork &w) {
      Array in = w.read(concatenate(inputs)), out = w.buffer(outputs, inputs.at(0));
      exchange(w, in, counts_of(inputs), out, counts_of(outputs));
    });
  }
  Result alltoall_base(at::Tensor &output, at::Tensor &input, Rows &output_rows, Rows &input_rows,
                       const AllToAllOptions &) override {
    return start(OpType::ALLTOALL_BASE, "cddp:all_to_all", {output}, [&](CddpWork &w) {
      require_same_type(output, input);
      Array in = w.read(input), out = w.write(output);
      exchange(w, in, row_counts(input, input_rows), out, row_counts(output, output_rows));
    });
  }
  Result send(Tensors &tensors, int to, int tag) override {
    return start(OpType::SEND, "cddp:send", tensors, [&](CddpWork &w) {
      Array a = w.read(tensors.at(0));
      check(cddp_send(group_, a.data, a.count, a.dtype, to, tag, w.handle()));
    });
  }
  Result recv(Tensors &tensors, int from, int tag) override {
    return start(OpType::RECV, "cddp:recv", tensors, [&](CddpWork &w) {
      Array a = w.write(tensors.at(0));
      check(cddp_recv(group_, a.data, a.count, a.dtype, from, tag, w.handle()));
    });
  }
  Result recvAnysource(Tensors &tensors, int tag) override { return recv(tensors, CDDP_ANY, tag); }
  Result barrier(const BarrierOptions &) override {
    return start(OpType::BARRIER, "cddp:barrier", {},
                 [&](CddpWork &w) { check(cddp_barrier_async(group_, w.handle())); });
  }
  /* The ranks tell rank 0 that they have arrived, and rank 0 answers when all have. Unlike after a
     time-out of cddp_barrier the group is not broken. The texts have gloo's words. */
  void monitoredBarrier(const BarrierOptions &opts, bool wait_all_ranks) override {
    Milliseconds limit = opts.timeout == kUnsetTimeout ? timeout_ : opts.timeout;
    auto deadline = std::chrono::steady_clock::now() + limit;
    Tensors word = {at::zeros({1})};
    std::string why;
    auto hears = [&](int from) { /* before the deadline */
      WorkPointer work = c10::static_intrusive_pointer_cast<CddpWork>(recv(word, from, INT_MAX));
      auto left = std::chrono::ceil<Milliseconds>(deadline - std::chrono::steady_clock::now());
      try {
        return work->wait(std::max(left, Milliseconds(1)));
      } catch (std::exception &e) {
        why = e.what();
      }
      work->end();
      return false;
    };
    if (rank_ != 0) {
      send(word, 0, INT_MAX);
      if (hears(0)) return;
      FAIL("Rank ", rank_, " successfully reached monitoredBarrier, but received errors while ",
           "waiting for send/recv from rank 0: ", why);
    }
    std::vector<int> missing;
    for (int r = 1; r < size_ && (wait_all_ranks || missing.empty()); r++)
      if (!hears(r)) missing.push_back(r);
    for (int r = 1; r < size_ && missing.empty(); r++) send(word, r, INT_MAX);
    if (missing.empty()) return;
    FAIL("Rank 0 timed out in monitoredBarrier after ", limit.count(), " ms: Rank",
         wait_all_ranks ? "s " : " ", c10::Join(", ", missing),
         " failed to pass monitoredBarrier: ", why);
  }
  /* The calls between these two have one work. */
  void startCoalescing() override { coalesced_ = c10::make_intrusive<CddpWork>(rank_); }
  Result endCoalescing() override {
    works_.push_back(coalesced_);
    return std::exchange(coalesced_, WorkPointer());
  }

 private:
  /* body starts the operations of a work, in the order of the calls on this group. The list keeps a
     work, and so its tensors, until its operations are complete: the program can drop it. */
  template <class Body>
  Result start(OpType type, const char *title, const Tensors &outputs, Body body) {
    std::lock_guard<std::mutex> lock(mutex_);
    WorkPointer work = coalesced_;
    if (!work) work = c10::make_intrusive<CddpWork>(rank_, type, title, outputs);
    work->outputs.insert(work->outputs.end(), outputs.begin(), outputs.end());
    work->has_future = !isP2POp(type);
    sequence_ += work->has_future;
    body(*work);
    bool many = works_.size() >= 64; /* has the program forgotten to wait? */
    works_.remove_if([many](WorkPointer &w) { return many ? w->isCompleted() : w->ended(); });
    if (!coalesced_) works_.push_back(work);
    return work;
  }

  void require_parts(const at::Tensor &all, const at::Tensor &one) const {
    require_same_type(all, one);
    if (all.numel() == one.numel() * size_) return;
    FAIL("cddp: ", all.numel(), " elements are not ", size_, " times ", one.numel());
  }
  void gather_all(CddpWork &w, const Tensors &outputs, const at::Tensor &input) {
    Array in = w.read(input), out = w.buffer(outputs, input);
    Counts counts = counts_of(outputs);
    bool right = (int)counts.size() == size_ && counts[rank_] == in.count;
    if (!right) FAIL("cddp: all_gather needs an output for each rank, as large as its input");
    check(equal_sizes(outputs)
              ? cddp_all_gather(group_, in.data, out.data, in.count, in.dtype, w.handle())
              : cddp_all_gather_v(group_, in.data, out.data, counts.data(), in.dtype, w.handle()));
  }

  /* rows: of t's first dimension, for each rank. Empty: equal parts. */
  Counts row_counts(const at::Tensor &t, const Rows &rows) const {
    checkSplitSizes(rows, t, size_);
    Counts counts(size_, array_of(t).count / size_);
    for (size_t r = 0; r < rows.size(); r++)
      counts[r] = t.numel() ? array_of(t).count / t.size(0) * rows[r] : 0;
    return counts;
  }
  void exchange(CddpWork &w, Array in, const Counts &to, Array out, const Counts &from) {
    bool right = (int)to.size() == size_ && (int)from.size() == size_;
    if (!right) FAIL("cddp: all_to_all needs a part for each rank");
    check(cddp_all_to_all_v(group_, in.data, &to[0], out.data, &from[0], in.dtype, w.handle()));
  }

  /* Gathers the rows of all ranks, and adds those with equal indices. Blocks. */
  Result sum_sparse(Tensors &tensors, const ReduceOp &op) {
    if (op.op_ != ReduceOp::SUM) REFUSE("reductions of sparse tensors, except ReduceOp.SUM");
    return start(OpType::ALLREDUCE, "cddp:sparse_all_reduce", tensors, [&](CddpWork &) {
      at::Tensor mine = tensors[0].coalesce();
      Rows rows(size_, mine._nnz());
      check(cddp_all_gather(group_, &rows[rank_], rows.data(), 1, CDDP_I64, nullptr));
      auto gathered = [&](const at::Tensor &t) { /* [rows][...] of all ranks in a row */
        Rows shape = t.sizes().vec();
        shape[0] = sum(rows);
        at::Tensor own = t.contiguous(), all = own.new_empty(shape);
        check(cddp_all_gather_v(group_, own.data_ptr(), all.data_ptr(),
                                row_counts(all, rows).data(), array_of(own).dtype, nullptr));
        return all;
      };
      at::Tensor indices = gathered(mine._indices().t()), values = gathered(mine._values());
      tensors[0].copy_(at::sparse_coo_tensor(indices.t(), values, mine.sizes()).coalesce());
    });
  }

  const pid_t creator_ = getpid();
  const Milliseconds timeout_;
  cddp_group *group_ = nullptr;
  std::mutex mutex_; /* one thread at a time starts operations */
  uint64_t sequence_ = 0;
  std::list<WorkPointer> works_;
  WorkPointer coalesced_;
};

static intrusive_ptr<Backend> create(const std::string &init_method, const std::string &secret,
                                     int rank, int size, std::chrono::duration<float> timeout) {
  return c10::make_intrusive<CddpBackend>(init_method, secret, rank, size, timeout);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("create", &create, py::call_guard<py::gil_scoped_release>());
}
