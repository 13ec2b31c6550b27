/* halves.pml - two halves of a split network never both go on: the majority rule of >>elastic.

   Nobody ends: each loss is one that nobody can prove. Processes 0, 1 and 2 are members; 3 and 4
   join. At any moment a leader makes a table of any reports: who is in it gives up the table that
   it waits for. A table arrives at each process that waits for it, or not; who has it confirms it.
   When all have confirmed, the leader goes on, and its GO arrives at each or not. A table is whole
   when all its members have GO, as its first collective needs all of them.

   RULE 1: a leader needs reports of more than half of the last table that it has received.
   RULE 2: of the last table with GO, and of each later one that it has received.
   RULE 3: the same, and no report is newer than its own last table. This is the header's rule.
   TABLES: how many tables are made at most, 2 to 4. */
#ifndef RULE
#define RULE 3
#endif
#ifndef TABLES
#define TABLES 3
#endif
#define B(p) (1 << (p))
#define IN(p, s) (((s) >> (p)) & 1)
#define COUNT(s) (IN(0, s) + IN(1, s) + IN(2, s) + IN(3, s) + IN(4, s))
#define MOST(s, t) (2 * COUNT((s) & mask[t]) > COUNT(mask[t]))

byte mask[5], epoch[5], leader[5]; /* of a table. Table 0: the first members */
byte confirmed[5], go[5];          /* who has confirmed it, or has its GO */
byte made;                         /* tables so far, beside table 0 */
byte later[5];                     /* by process: the tables that it has received since its last GO */
byte last[5], with_go[5];          /* by process: its last table, and the last one with GO */
byte waits[5];                     /* by process: for this table, or its GO; 0: for none */
byte members = 7;                  /* who has had a GO */

#define LATER(l, s, t) (!IN(t, later[l]) || MOST(s, t))
#define EACH(l, s) \
  (MOST(s, with_go[l]) && LATER(l, s, 1) && LATER(l, s, 2) && LATER(l, s, 3) && LATER(l, s, 4))
#define NEWER(l, s, p) (IN(p, (s) & members) && epoch[last[p]] > epoch[last[l]])
#define OLD(l, s) \
  (!NEWER(l, s, 0) && !NEWER(l, s, 1) && !NEWER(l, s, 2) && !NEWER(l, s, 3) && !NEWER(l, s, 4))
#if RULE == 1
#define ALLOWED(l, s) MOST(s, last[l])
#elif RULE == 2
#define ALLOWED(l, s) EACH(l, s)
#else
#define ALLOWED(l, s) (EACH(l, s) && OLD(l, s))
#endif

inline choose(p) { if :: s = s | B(p) :: skip fi }

inline use_report(p) {
  if
  :: IN(p, s) ->
     waits[p] = made;
     if :: IN(p, members) && epoch[last[p]] >= epoch[made] -> epoch[made] = epoch[last[p]] + 1
        :: else
     fi
  :: else
  fi
}

#define MEET(k) \
  :: atomic { made < TABLES && IN(k, members) -> l = k; s = B(k); \
       choose(0); choose(1); choose(2); choose(3); choose(4); \
       if \
       :: d_step { ALLOWED(l, s) -> \
            made++; mask[made] = s; leader[made] = l; epoch[made] = epoch[last[l]] + 1; \
            use_report(0); use_report(1); use_report(2); use_report(3); use_report(4); \
            last[l] = made; later[l] = later[l] | B(made); confirmed[made] = B(l) } \
       :: else \
       fi; \
       l = 0; s = 0 }
#define TABLE(p) \
  :: d_step { waits[p] > 0 && last[p] != waits[p] -> \
       last[p] = waits[p]; later[p] = later[p] | B(waits[p]); \
       confirmed[waits[p]] = confirmed[waits[p]] | B(p) }
#define GO(p) \
  :: d_step { waits[p] > 0 && last[p] == waits[p] && confirmed[waits[p]] == mask[waits[p]] && \
              (leader[waits[p]] == p || IN(leader[waits[p]], go[waits[p]])) -> \
       go[waits[p]] = go[waits[p]] | B(p); with_go[p] = waits[p]; later[p] = 0; \
       members = members | B(p); waits[p] = 0 }

/* All members of table t have GO, and none has given it up. */
#define HAS(p, t) (!IN(p, mask[t]) || (IN(p, go[t]) && last[p] == t && waits[p] == 0))
#define WHOLE(t) (HAS(0, t) && HAS(1, t) && HAS(2, t) && HAS(3, t) && HAS(4, t))
#define HALVES(t, u) (made >= u && (mask[t] & mask[u]) == 0 && WHOLE(t) && WHOLE(u))

active proctype Network() {
  byte l, s;
  d_step { mask[0] = 7; go[0] = 7 };
  do
  :: d_step { HALVES(0, 1) || HALVES(1, 2) || HALVES(1, 3) || HALVES(2, 3) || HALVES(1, 4) ||
              HALVES(2, 4) || HALVES(3, 4) -> assert(false) }
  MEET(0) MEET(1) MEET(2) MEET(3) MEET(4)
  TABLE(0) TABLE(1) TABLE(2) TABLE(3) TABLE(4)
  GO(0) GO(1) GO(2) GO(3) GO(4)
  :: made == TABLES -> break
  od
}
