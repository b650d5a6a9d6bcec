; A call from XLA computed by several of its threads, see team.py, which appends @pause for the architecture.
;
; The upper half of @ticket counts jobs, the lower half is how many parts of this one are not taken. To take the next parts is to replace the
; ticket by one that is lower by their number, which fails if another thread took some meanwhile. A job's fields are written only while there is
; nothing to take, so a thread that has taken parts has read its job's fields.
;
; A thread takes two thirds of its fair share of what is left, at least one part. Consecutive parts lie side by side in memory, so what a part
; prefetches behind its own end is the start of the thread's next one; the last, short turns balance the threads.

@busy = internal global i64 0, align 64                      ; 1 while a caller has the job
@ticket = internal global i64 0, align 64
@left = internal global i64 0, align 64                      ; parts that are not done
@job = internal global [3 x i64] zeroinitializer, align 64   ; function, frame, parts
@helpers = internal global i64 0, align 64                   ; threads that a caller asks for

declare i32 @sched_yield()
declare i64 @llvm.umax.i64(i64, i64)

define void @limit(i64 %helpers) {
  store atomic i64 %helpers, ptr @helpers seq_cst, align 8
  ret void
}

; In a process that was forked, whose only thread has no part in a job.
define void @forget() {
  store i64 0, ptr @ticket
  store i64 0, ptr @busy
  ret void
}

; Take parts of the job and do them, until none is left to take. Whenever it comes, it does no harm: a task of XLA's pool.
define internal void @help(ptr %nothing) {
entry:
  br label %look
look:
  %ticket = load atomic i64, ptr @ticket acquire, align 8
  %untaken = and i64 %ticket, 4294967295
  %none = icmp eq i64 %untaken, 0
  br i1 %none, label %done, label %try
try:
  %others = load atomic i64, ptr @helpers monotonic, align 8
  %threads = add i64 %others, 1
  %thrice = mul i64 %threads, 3
  %twice = shl i64 %untaken, 1
  %share = udiv i64 %twice, %thrice
  %turn = call i64 @llvm.umax.i64(i64 %share, i64 1)
  %function = load atomic i64, ptr @job monotonic, align 8
  %frame = load atomic i64, ptr getelementptr ([3 x i64], ptr @job, i64 0, i64 1) monotonic, align 8
  %parts = load atomic i64, ptr getelementptr ([3 x i64], ptr @job, i64 0, i64 2) monotonic, align 8
  %lower = sub i64 %ticket, %turn
  %swap = cmpxchg ptr @ticket, i64 %ticket, i64 %lower acq_rel monotonic
  %taken = extractvalue {i64, i1} %swap, 1
  br i1 %taken, label %begin, label %look
begin:
  %f = inttoptr i64 %function to ptr
  %first = sub i64 %parts, %untaken
  %end = add i64 %first, %turn
  br label %work
work:
  %part = phi i64 [%first, %begin], [%next, %work]
  call void %f(i64 %frame, i64 %part, i64 %parts)
  %next = add i64 %part, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %work, label %worked
worked:
  atomicrmw sub ptr @left, i64 %turn release
  br label %look
done:
  ret void
}

; Ask XLA's pool for so many helpers: by its interface, the 18th word of whose table is XLA_FFI_ThreadPool_Schedule. What it
; answers does not matter: the caller does what nobody else does.
define internal void @summon(i64 %frame, i64 %count) {
entry:
  %args = alloca [5 x i64]                                   ; their size, no extension, the context, the task, its argument
  %base = inttoptr i64 %frame to ptr
  %api_place = getelementptr i64, ptr %base, i64 2
  %api = load ptr, ptr %api_place
  %context_place = getelementptr i64, ptr %base, i64 3
  %context = load i64, ptr %context_place
  %schedule_place = getelementptr i64, ptr %api, i64 17
  %schedule = load ptr, ptr %schedule_place
  store [5 x i64] [i64 40, i64 0, i64 0, i64 0, i64 0], ptr %args
  %second = getelementptr i64, ptr %args, i64 2
  store i64 %context, ptr %second
  %third = getelementptr i64, ptr %args, i64 3
  store ptr @help, ptr %third
  br label %each
each:
  %asked = phi i64 [0, %entry], [%next, %each]
  call ptr %schedule(ptr %args)
  %next = add i64 %asked, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %each, label %done
done:
  ret void
}

; Call function(frame, part, parts) for every part, with XLA's threads if no other call has them, and return when all are done.
define void @run(i64 %function, i64 %frame, i64 %parts) {
entry:
  %helpers = load atomic i64, ptr @helpers monotonic, align 8
  %no_helpers = icmp eq i64 %helpers, 0
  %few = icmp sle i64 %parts, 1
  %single = or i1 %no_helpers, %few
  br i1 %single, label %alone, label %ask
ask:
  %swap = cmpxchg ptr @busy, i64 0, i64 1 acquire monotonic
  %free = extractvalue {i64, i1} %swap, 1
  br i1 %free, label %publish, label %alone

alone:
  %f = inttoptr i64 %function to ptr
  br label %each
each:
  %part = phi i64 [0, %alone], [%next, %each]
  call void %f(i64 %frame, i64 %part, i64 %parts)
  %next = add i64 %part, 1
  %more = icmp slt i64 %next, %parts
  br i1 %more, label %each, label %all
all:
  ret void

publish:
  store atomic i64 %function, ptr @job monotonic, align 8
  store atomic i64 %frame, ptr getelementptr ([3 x i64], ptr @job, i64 0, i64 1) monotonic, align 8
  store atomic i64 %parts, ptr getelementptr ([3 x i64], ptr @job, i64 0, i64 2) monotonic, align 8
  store atomic i64 %parts, ptr @left monotonic, align 8
  %last = load atomic i64, ptr @ticket monotonic, align 8
  %jobs = add i64 %last, 4294967296
  %ticket = or i64 %jobs, %parts
  store atomic i64 %ticket, ptr @ticket release, align 8
  call void @summon(i64 %frame, i64 %helpers)
  call void @help(ptr null)
  br label %wait
wait:                                                        ; for parts that others took
  %spins = phi i64 [0, %publish], [%count, %spin], [0, %yield]
  %left = load atomic i64, ptr @left acquire, align 8
  %finished = icmp eq i64 %left, 0
  br i1 %finished, label %done, label %unfinished
unfinished:
  %count = add i64 %spins, 1
  %long = icmp ugt i64 %count, 2048
  br i1 %long, label %yield, label %spin
spin:
  call void @pause()
  br label %wait
yield:                                                       ; perhaps to one that lost its core
  call i32 @sched_yield()
  br label %wait
done:
  store atomic i64 0, ptr @busy release, align 8
  ret void
}
