/* meeting.pml - losses and a join in an elastic model: the meetings of >>elastic.

   Processes 0 to 2 are members, process 3 joins. Each makes R reductions, and a reduction needs all
   members of the table. Who cannot complete one reports to the oldest member that it counts as
   living. That leader sends a table, each member confirms it (BUILT), and the leader says GO, or
   AGAIN if one was lost. Then who lacks the last mean gets it, and the joining process gets a
   snapshot: this needs all members, too.

   CH(f, t) is what travels from f to t. What a dead process has sent is still delivered; then its
   end is seen. A report begins a new connection: what was in transit on the old one is lost.
   There is no time, so a suspended process is one that takes no step for long.

     CR=n        crashes, each at any wait or between any two sends of a leader
     DOUBTS=n    false losses: a member counts its leader as lost, without proof
     R=n         reductions
     NO_CALLS, NO_MAJORITY, NO_REPEAT    the rules that the header had not: each makes a check fail
   Not modelled: several joining processes and splits (halves.pml), time-outs, restarted ranks. */
#ifndef CR
#define CR 1
#endif
#ifndef DOUBTS
#define DOUBTS 0
#endif
#ifndef R
#define R 2
#endif
#define TABLES 12 /* more than a run makes */

mtype = { REPORT, TABLE, BUILT, GO, AGAIN, FAIL, CALL };
mtype = { NONE, OK, ABORTED, CRASHED, NO_JOB };
#define B(p) (1 << (p))
#define IN(p, s) (((s) >> (p)) & 1)
/* What a report tells, in its last field. */
#define REPORT_OF(p) (connection[p] * 16 + done[p] * 4 + has_mean[p] * 2 + is_empty[p])
#define CONNECTION(d) ((d) / 16)
#define DONE(d) (((d) / 4) & 3)
#define MEAN(d) (((d) / 2) & 1)
#define COUNT(s) (IN(0, s) + IN(1, s) + IN(2, s) + IN(3, s))
#define OLDEST(s) (IN(0, s) -> 0 : (IN(1, s) -> 1 : (IN(2, s) -> 2 : 3)))

chan c[16] = [3] of { mtype, byte, byte };
#define CH(f, t) c[(f) * 4 + (t)]
bit gone[4];                  /* the process has ended */
bit closed[16];               /* f has closed its connection to t, and lives */
mtype result[4] = NONE;
byte crashes, doubts;

byte view[4];                 /* by process: who lives, as far as it knows */
byte last[4], with_go[4];     /* the last table that it has received, and the last one with GO */
short later[4];               /* the tables that it has received since with_go, a bit each */
byte done[4];                 /* its reductions */
byte connection[4];           /* the number of its connection to a leader */
bit has_mean[4], is_empty[4]; /* it has the last mean; it has no weights yet */
byte final[4];                /* the table in which it completed its last reduction; 0: none */

byte made;                    /* tables, numbered from 1. Table 0: the first members */
byte mask[TABLES], epoch[TABLES], most[TABLES], giver[TABLES];
bit repeats[TABLES];          /* no member has the mean of reduction `most`: the others repeat it */
bit broken[TABLES];
byte phase[TABLES * 4];       /* of each member, in the table's collectives */

#define AT(i, n, p) (!IN(p, mask[i]) || phase[(i) * 4 + p] >= n)
#define ALL_AT(i, n) (AT(i, n, 0) && AT(i, n, 1) && AT(i, n, 2) && AT(i, n, 3))
#define MISSES(i, n, p) (IN(p, mask[i]) && gone[p] && phase[(i) * 4 + p] < n)
#define LOST(i, n) \
  (broken[i] || MISSES(i, n, 0) || MISSES(i, n, 1) || MISSES(i, n, 2) || MISSES(i, n, 3))
#define ENDED(q) (gone[q] && empty(CH(q, me)))
#define CLOSED(q) (closed[(q) * 4 + me] && empty(CH(q, me)))

#define CRASHES :: atomic { crashes < CR -> crashes++; result[me] = CRASHED; goto dead }
#define MAY_CRASH if CRASHES :: skip fi

#ifdef NO_MAJORITY
#define MINORITY 0
#else
#define HALF(i) (2 * COUNT(reports & mask[i]) <= COUNT(mask[i]))
#define LATER_HALF(i) (((later[me] >> (i)) & 1) && HALF(i))
#define MINORITY \
  (unproven && (newer || HALF(with_go[me]) || LATER_HALF(1) || LATER_HALF(2) || LATER_HALF(3) || \
                LATER_HALF(4) || LATER_HALF(5) || LATER_HALF(6) || LATER_HALF(7)))
#endif

/* A call, or a report of a member, from a process that counts as lost: one in the last table is a
   member again. Otherwise it is told that the others go on without it. */
#define REFUSE(q) if :: nfull(CH(me, q)) -> CH(me, q)!FAIL, 0, 0 :: full(CH(me, q)) fi
#ifdef NO_CALLS
#define ANSWER(q)
#else
#define ANSWER(q) \
  :: atomic { q != me && !IN(q, view[me]) && !gone[q] && CH(q, me)??[CALL, _, _] -> \
       CH(q, me)??CALL, _, _; \
       if \
       :: IN(q, mask[last[me]]) -> \
          view[me] = view[me] | B(q); goto meet \
       :: else -> REFUSE(q) \
       fi }
#endif
#define ANSWERS ANSWER(0) ANSWER(1) ANSWER(2)

/* A leader, before its table and behind it. */
#ifdef NO_CALLS
#define CALL_IT(q) skip
#else
#define CALL_IT(q) if :: nfull(CH(me, q)) -> CH(me, q)!CALL, 0, 0 :: full(CH(me, q)) fi
#endif
#define SEES_END(q) \
  :: atomic { IN(q, view[me]) && me != q && ENDED(q) -> \
       view[me] = view[me] & ~B(q); reports = reports & ~B(q) } \
  :: atomic { IN(q, view[me]) && me != q && CLOSED(q) -> \
       closed[(q) * 4 + me] = 0; reports = reports & ~B(q); CALL_IT(q) }
#define SEES_LOSS(q) \
  :: atomic { IN(q, view[me]) && me != q && ENDED(q) -> view[me] = view[me] & ~B(q); lost = 1 } \
  :: atomic { IN(q, view[me]) && me != q && CLOSED(q) -> \
       closed[(q) * 4 + me] = 0; lost = 1; confirms = confirms | B(q) }

/* Another half goes on without this process. (One that has completed its training and ended cannot
   be told from one that died: then the rest trains to the end, too.) */
#define APART(q) (!gone[q] && (mask[final[q]] & mask[final[me]]) == 0)

inline connect_again() {
  connection[me] = connection[me] % 7 + 1; /* fewer are in transit */
  q = 0;
  do
  :: q < 4 ->
     if
     :: q == leader -> closed[me * 4 + q] = 0
     :: q != leader && q == reported -> closed[me * 4 + q] = 1
     :: else
     fi;
     do
     :: CH(me, q)??[REPORT, _, _] -> CH(me, q)??REPORT, _, _
     :: CH(me, q)??[BUILT, _, _] -> CH(me, q)??BUILT, _, _
     :: CH(me, q)??[CALL, _, _] -> CH(me, q)??CALL, _, _
     :: CH(q, me)??[TABLE, _, _] -> CH(q, me)??TABLE, _, _
     :: CH(q, me)??[GO, _, _] -> CH(q, me)??GO, _, _
     :: CH(q, me)??[AGAIN, _, _] -> CH(q, me)??AGAIN, _, _
     :: else -> break
     od;
     q++
  :: else -> break
  od;
  reported = leader;
  q = 0
}

proctype P(byte me) {
  byte leader, reported = 4, q, i, x, d, k, reports, confirms, early, asks, newest, had[4], on[4];
  bit lost, unproven, newer, meant[4];
  mtype t;
  if :: me == 3 -> goto seek :: else fi;

work:
  if :: done[me] == R -> result[me] = OK; goto dead :: else fi;
  if /* a reduction begins: is there a joining process? */
  :: atomic { CH(3, me)?[REPORT, _, _] && !IN(3, view[me]) ->
       if
       :: OLDEST(view[me]) == me -> CH(3, me)?REPORT, x, d;
          asks = B(3); had[3] = 0; meant[3] = 0; on[3] = CONNECTION(d); newest = x; goto meet
       :: else -> CH(3, me)?REPORT, _, _; CH(me, 3)!AGAIN, 0, 0
       fi }
  :: skip
  fi;
  atomic { k++; phase[last[me] * 4 + me] = k };
  do
  :: atomic { ALL_AT(last[me], k) ->
       /* a process that has joined helps to repeat a reduction that it does not need */
       if :: repeats[last[me]] && done[me] == most[last[me]] :: else -> done[me]++ fi;
       has_mean[me] = 1; final[me] = last[me];
       assert(!APART(0) && !APART(1) && !APART(2) && !APART(3)) } goto work
  :: LOST(last[me], k) -> goto meet
  ANSWERS
  CRASHES
  od;

meet:
  broken[last[me]] = 1;
pick:
  leader = OLDEST(view[me]);
  if
  :: is_empty[me] && leader == 3 -> goto seek /* all members are lost: there may be others */
  :: leader == me && !is_empty[me] -> goto lead
  :: else
  fi;
  skip;
  d_step { connect_again() };
  CH(me, leader)!REPORT, epoch[last[me]], REPORT_OF(me);
  do
  :: CH(leader, me)?t, x, d ->
     if
     :: t == TABLE && d == connection[me] -> last[me] = x; later[me] = later[me] | (1 << x); k = 0; view[me] = mask[x]; break
     :: t == FAIL -> result[me] = ABORTED; goto dead
     :: else
     fi
  :: ENDED(leader) -> view[me] = view[me] & ~B(leader); goto pick
  :: atomic { CLOSED(leader) -> closed[leader * 4 + me] = 0 } goto pick
  :: atomic { doubts < DOUBTS && me != 3 && leader != 3 && !gone[leader] ->
       doubts++; unproven = 1; closed[me * 4 + leader] = 1; view[me] = view[me] & ~B(leader) } goto pick
  ANSWERS
  CRASHES
  od;
  CH(me, leader)!BUILT, last[me], 0;
  do
  :: CH(leader, me)?t, x, d ->
     if
     :: t == GO && x == last[me] -> with_go[me] = x; later[me] = 0; unproven = 0; goto synchronize
     :: t == AGAIN && x == last[me] -> goto meet
     :: t == FAIL -> result[me] = ABORTED; goto dead
     :: else
     fi
  :: ENDED(leader) -> view[me] = view[me] & ~B(leader); goto meet
  :: atomic { CLOSED(leader) -> closed[leader * 4 + me] = 0 } goto meet
  ANSWERS
  CRASHES
  od;

lead:
  skip;
  d_step { reports = B(me) | (early & view[me]); early = 0; had[me] = done[me]; meant[me] = has_mean[me];
           if :: epoch[last[me]] > newest -> newest = epoch[last[me]] :: else fi };
#ifndef NO_CALLS
  q = 0;
  do
  :: q < 3 ->
     if
     :: q != me && IN(q, view[me]) && !gone[q] -> if :: CH(me, q)!CALL, 0, 0 :: full(CH(me, q)) fi
     :: else
     fi; q++
  :: else -> break
  od;
#endif
  do
  :: CH(0, me)?t, x, d -> q = 0; goto got
  :: CH(1, me)?t, x, d -> q = 1; goto got
  :: CH(2, me)?t, x, d -> q = 2; goto got
  :: CH(3, me)?t, x, d -> q = 3;
got: atomic {
     if
     :: t == REPORT && !IN(q, view[me]) && !(d & 1) && IN(q, mask[last[me]]) -> /* it lives */
        view[me] = view[me] | B(q)
     :: else
     fi;
     if
     :: t == REPORT && IN(q, view[me]) ->
        reports = reports | B(q); had[q] = DONE(d); meant[q] = MEAN(d); on[q] = CONNECTION(d);
        if :: x > newest -> newest = x :: else fi;
        if :: x > epoch[last[me]] -> newer = 1 :: else fi
     :: t == REPORT && !IN(q, view[me]) && (d & 1) ->
        asks = B(q); had[q] = 0; meant[q] = 0; on[q] = CONNECTION(d);
        if :: x > newest -> newest = x :: else fi
     :: t == REPORT && !IN(q, view[me]) && !(d & 1) -> REFUSE(q)
#ifndef NO_CALLS
     :: t == CALL && !IN(q, view[me]) && IN(q, mask[last[me]]) ->
        view[me] = view[me] | B(q);
        /* who has reported to this rank finds its connections closed, and reports again */
        if :: OLDEST(view[me]) != me -> goto yield :: else fi
     :: t == CALL && !IN(q, view[me]) && !IN(q, mask[last[me]]) -> REFUSE(q)
#endif
     :: t == FAIL -> result[me] = ABORTED; goto dead
     :: else
     fi }
  SEES_END(0)
  SEES_END(1)
  SEES_END(2)
  SEES_END(3)
  :: (reports & view[me]) == view[me] -> break
  CRASHES
  od;
  skip;
  if :: MINORITY -> result[me] = ABORTED; goto dead :: else fi;
  d_step {
    if :: gone[3] -> asks = 0 :: else fi;
    made++; i = made; k = 0;
    mask[i] = view[me] | asks; view[me] = mask[i]; epoch[i] = newest + 1;
    q = 0; giver[i] = 9; /* the first with the most reductions, of those one that has the mean */
    do
    :: q < 4 ->
       if
       :: IN(q, mask[i]) && !IN(q, asks) && (giver[i] == 9 || had[q] > most[i] ||
             (had[q] == most[i] && meant[q] && !meant[giver[i]])) -> giver[i] = q; most[i] = had[q]
       :: else
       fi; q++
    :: else -> break
    od;
    q = 0;
#ifndef NO_REPEAT
    do
    :: q < 4 ->
       if
       :: IN(q, mask[i]) && !IN(q, asks) && had[q] < most[i] && !meant[giver[i]] -> repeats[i] = 1
       :: else
       fi; q++
    :: else -> break
    od;
#endif
    last[me] = i; later[me] = later[me] | (1 << i);
    q = 0; asks = 0; x = 0; d = 0; newest = 0; newer = 0
  };
  do
  :: q < 4 ->
     if
     :: q != me && IN(q, mask[i]) -> MAY_CRASH; CH(me, q)!TABLE, i, on[q]
     :: else
     fi; q++
  :: else -> break
  od;
  lost = 0;
  confirms = B(me);
  do
  :: CH(0, me)?t, x, d -> q = 0; goto got2
  :: CH(1, me)?t, x, d -> q = 1; goto got2
  :: CH(2, me)?t, x, d -> q = 2; goto got2
  :: CH(3, me)?t, x, d -> q = 3;
got2: atomic {
     if
     :: t == BUILT && x == i && IN(q, view[me]) -> confirms = confirms | B(q)
     :: t == FAIL -> result[me] = ABORTED; goto dead
     :: t == REPORT && q == 3 && !IN(3, mask[i]) -> /* it asks again */
        if :: nfull(CH(me, q)) -> CH(me, 3)!AGAIN, 0, 0 :: full(CH(me, q)) fi
#ifndef NO_CALLS
     :: (t == CALL || (t == REPORT && q != 3)) && !IN(q, mask[i]) -> REFUSE(q)
#endif
     :: t == REPORT && IN(q, mask[i]) -> /* it has given up, and waits for the next table */
        lost = 1; confirms = confirms | B(q); early = early | B(q);
        had[q] = DONE(d); meant[q] = MEAN(d); on[q] = CONNECTION(d);
        if :: x > newest -> newest = x :: else fi;
        if :: x > epoch[last[me]] -> newer = 1 :: else fi
     :: else
     fi }
  SEES_LOSS(0)
  SEES_LOSS(1)
  SEES_LOSS(2)
  SEES_LOSS(3)
  :: (confirms & view[me]) == view[me] -> break
  CRASHES
  od;
  q = 0;
  if :: !lost -> with_go[me] = i; later[me] = 0; unproven = 0 :: else fi;
  do
  :: q < 4 ->
     if
     :: q != me && IN(q, view[me]) -> MAY_CRASH;
        if :: lost -> CH(me, q)!AGAIN, i, 0 :: else -> CH(me, q)!GO, i, 0 fi
     :: else
     fi; q++
  :: else -> break
  od;
  if :: lost -> goto meet :: else fi;
  goto synchronize;

yield: /* another leads */
  skip;
  d_step {
    asks = 0; newest = 0; reports = 0; early = 0; newer = 0; q = 0;
    do :: q < 4 -> closed[me * 4 + q] = 1; q++ :: else -> break od;
    q = 0
  };
  goto pick;

synchronize: /* the mean and the snapshot: a collective of the new group */
  atomic { k = 1; i = last[me]; phase[i * 4 + me] = 1 };
  do
  :: atomic { ALL_AT(i, 1) ->
       if
       :: !is_empty[me] && done[me] < most[i] && !repeats[i] ->
          assert(has_mean[giver[i]]); /* who gives a mean has it */
          done[me] = most[i]; has_mean[me] = 1
       :: is_empty[me] -> is_empty[me] = 0; done[me] = most[i]; has_mean[me] = 0
       :: else
       fi } goto work
  :: LOST(i, 1) -> goto meet
  ANSWERS
  CRASHES
  od;

seek:
  view[me] = 0;
  do
  :: gone[0] && gone[1] && gone[2] -> result[me] = NO_JOB; goto dead
  :: atomic { !gone[0] && !gone[OLDEST(view[0])] && OLDEST(view[0]) != 3 -> leader = OLDEST(view[0]) } break
  :: atomic { !gone[1] && !gone[OLDEST(view[1])] && OLDEST(view[1]) != 3 -> leader = OLDEST(view[1]) } break
  :: atomic { !gone[2] && !gone[OLDEST(view[2])] && OLDEST(view[2]) != 3 -> leader = OLDEST(view[2]) } break
  CRASHES
  od;
  skip;
  d_step { connect_again() };
  if :: CH(me, leader)!REPORT, epoch[last[me]], REPORT_OF(me) :: gone[leader] -> goto seek fi;
  do
  :: CH(leader, me)?t, x, d ->
     if
     :: t == TABLE && d == connection[me] -> last[me] = x; later[me] = later[me] | (1 << x); k = 0; view[me] = mask[x]; break
     :: t == AGAIN -> goto seek
     :: t == FAIL -> result[me] = ABORTED; goto dead
     :: else
     fi
  :: ENDED(leader) -> goto seek
  CRASHES
  od;
  CH(me, leader)!BUILT, last[me], 0;
  do
  :: CH(leader, me)?t, x, d ->
     if
     :: t == GO && x == last[me] -> with_go[me] = x; later[me] = 0; goto synchronize
     :: t == AGAIN && x == last[me] -> goto meet
     :: t == FAIL -> result[me] = ABORTED; goto dead
     :: else
     fi
  :: ENDED(leader) -> view[me] = view[me] & ~B(leader); goto meet
  CRASHES
  od;

dead:
  gone[me] = 1; /* its connections end: what others send to it is dropped */
  do
  :: CH(0, me)?_, _, _ :: CH(1, me)?_, _, _ :: CH(2, me)?_, _, _ :: CH(3, me)?_, _, _
  :: gone[0] && gone[1] && gone[2] && gone[3] -> break
  od
}

#define IS(p, r) (result[p] == r)
init {
  d_step { mask[0] = 7; epoch[0] = 1; view[0] = 7; view[1] = 7; view[2] = 7; is_empty[3] = 1 };
  atomic { run P(0); run P(1); run P(2); run P(3) };
  (_nr_pr == 1);
  /* without a crash and a false loss all succeed, or the joining process was too late */
  assert(crashes > 0 || doubts > 0 ||
         (IS(0, OK) && IS(1, OK) && IS(2, OK) && (IS(3, OK) || IS(3, NO_JOB))));
  /* nobody is cast out without a false loss */
  assert(doubts > 0 || (!IS(0, ABORTED) && !IS(1, ABORTED) && !IS(2, ABORTED) && !IS(3, ABORTED)));
  /* who succeeds has made all reductions */
  assert((!IS(0, OK) || done[0] == R) && (!IS(1, OK) || done[1] == R) && (!IS(2, OK) || done[2] == R))
}
