; A team of threads, see team.py, which appends @pause for the architecture.
;
; The upper half of @ticket counts jobs, the lower half is how many parts of this one are not taken. To take a part is to replace the ticket by the
; next lower one, which fails where another thread took that part. A job's fields are written only while there is nothing to take, so who
; has taken a part has read its job's fields.

@busy = internal global i64 0, align 64                      ; 1 while a caller has the team
@ticket = internal global i64 0, align 64
@left = internal global i64 0, align 64                      ; parts that are not done
@sleepers = internal global i64 0, align 64
@stopped = internal global i64 0, align 64
@workers = internal global i64 0, align 64
@job = internal global [3 x i64] zeroinitializer, align 64   ; function, frame, parts
@pipe = internal global [2 x i32] zeroinitializer, align 64  ; its ends: each byte wakes one sleeper
@bytes = internal global [64 x i8] zeroinitializer, align 64

declare i32 @sched_yield()
declare i32 @usleep(i32)
declare i64 @read(i32, ptr, i64)
declare i64 @write(i32, ptr, i64)

; Before the workers are made, of which there are none now.
define void @start(i64 %workers, i32 %read_end, i32 %write_end) {
  store i32 %read_end, ptr @pipe
  store i32 %write_end, ptr getelementptr ([2 x i32], ptr @pipe, i64 0, i64 1)
  store i64 0, ptr @sleepers
  store i64 0, ptr @stopped
  store atomic i64 %workers, ptr @workers seq_cst, align 8
  ret void
}

; In a process that was forked, whose only thread has no part in a job.
define void @forget() {
  store i64 0, ptr @workers
  store i64 0, ptr @ticket
  store i64 0, ptr @busy
  ret void
}

; Callers compute alone from now on; workers return when they have done what they took.
define void @stop() {
  store atomic i64 0, ptr @workers monotonic, align 8
  store atomic i64 1, ptr @stopped seq_cst, align 8
  call void @wake(i64 64)
  ret void
}

define internal void @wake(i64 %count) {
  %many = icmp ugt i64 %count, 64
  %bytes = select i1 %many, i64 64, i64 %count
  %end = load i32, ptr getelementptr ([2 x i32], ptr @pipe, i64 0, i64 1)
  call i64 @write(i32 %end, ptr @bytes, i64 %bytes)
  ret void
}

; Take parts of the job and do them, until none is left to take.
define internal void @take() {
entry:
  br label %look
look:
  %ticket = load atomic i64, ptr @ticket acquire, align 8
  %untaken = and i64 %ticket, 4294967295
  %none = icmp eq i64 %untaken, 0
  br i1 %none, label %done, label %try
try:
  %function = load atomic i64, ptr @job monotonic, align 8
  %frame = load atomic i64, ptr getelementptr ([3 x i64], ptr @job, i64 0, i64 1) monotonic, align 8
  %parts = load atomic i64, ptr getelementptr ([3 x i64], ptr @job, i64 0, i64 2) monotonic, align 8
  %lower = sub i64 %ticket, 1
  %swap = cmpxchg ptr @ticket, i64 %ticket, i64 %lower acq_rel monotonic
  %taken = extractvalue {i64, i1} %swap, 1
  br i1 %taken, label %work, label %look
work:
  %part = sub i64 %parts, %untaken
  %f = inttoptr i64 %function to ptr
  call void %f(i64 %frame, i64 %part, i64 %parts)
  atomicrmw sub ptr @left, i64 1 release
  br label %look
done:
  ret void
}

; Call function(frame, part, parts) for every part, on all threads if the team is free, and return when all are done.
define void @run(i64 %function, i64 %frame, i64 %parts) {
entry:
  %workers = load atomic i64, ptr @workers acquire, align 8
  %no_workers = icmp eq i64 %workers, 0
  %few = icmp sle i64 %parts, 1
  %single = or i1 %no_workers, %few
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
  store atomic i64 %ticket, ptr @ticket seq_cst, align 8
  %sleepers = atomicrmw xchg ptr @sleepers, i64 0 seq_cst
  %asleep = icmp ne i64 %sleepers, 0
  br i1 %asleep, label %rouse, label %help
rouse:
  call void @wake(i64 %sleepers)
  br label %help
help:
  call void @take()
  br label %wait
wait:                                                        ; for parts that workers took
  %spins = phi i64 [0, %help], [%count, %spin], [0, %yield]
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
yield:                                                       ; perhaps to a worker that lost its core
  call i32 @sched_yield()
  br label %wait
done:
  store atomic i64 0, ptr @busy release, align 8
  ret void
}

; What a worker's thread does: parts of jobs; for some 10 us after the last it spins, for some 100 it yields, then it sleeps.
define void @work() {
entry:
  br label %fresh
fresh:
  br label %look
look:
  %tries = phi i64 [0, %fresh], [%next, %spin], [%next, %yield]
  %over = load atomic i64, ptr @stopped monotonic, align 8
  %end = icmp ne i64 %over, 0
  br i1 %end, label %out, label %peek
peek:
  %ticket = load atomic i64, ptr @ticket monotonic, align 8
  %untaken = and i64 %ticket, 4294967295
  %some = icmp ne i64 %untaken, 0
  br i1 %some, label %work, label %idle
work:
  call void @take()
  br label %fresh
idle:
  %next = add i64 %tries, 1
  %short = icmp ult i64 %next, 256
  br i1 %short, label %spin, label %longer
spin:
  call void @pause()
  br label %look
longer:
  %long = icmp ugt i64 %next, 512
  br i1 %long, label %lie_down, label %yield
yield:                                                       ; to XLA's threads, whose operations come between jobs
  call i32 @sched_yield()
  br label %look

lie_down:
  atomicrmw add ptr @sleepers, i64 1 seq_cst
  %late_ticket = load atomic i64, ptr @ticket seq_cst, align 8
  %late_untaken = and i64 %late_ticket, 4294967295
  %late_over = load atomic i64, ptr @stopped seq_cst, align 8
  %either = or i64 %late_untaken, %late_over
  %came = icmp ne i64 %either, 0
  br i1 %came, label %get_up, label %asleep
get_up:                                                      ; a caller may have counted this sleeper: then its byte wakes one for nothing
  %count = load atomic i64, ptr @sleepers monotonic, align 8
  %counted = icmp eq i64 %count, 0
  br i1 %counted, label %fresh, label %uncount
uncount:
  %fewer = sub i64 %count, 1
  %swap = cmpxchg ptr @sleepers, i64 %count, i64 %fewer seq_cst monotonic
  %uncounted = extractvalue {i64, i1} %swap, 1
  br i1 %uncounted, label %fresh, label %get_up
asleep:
  %end_of_pipe = load i32, ptr @pipe
  %got = call i64 @read(i32 %end_of_pipe, ptr getelementptr ([64 x i8], ptr @bytes, i64 0, i64 32), i64 1)
  %woken = icmp eq i64 %got, 1
  br i1 %woken, label %fresh, label %failed
failed:                                                      ; a signal; or the process closed all of its files
  call i32 @usleep(i32 1000)
  br label %get_up
out:
  ret void
}
