/* options.h - the command lines of digits and gpt: a table of options, each followed by a value. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum option_type { INTEGER, REAL, TEXT } option_type;

typedef struct option {
  const char *name;
  option_type type;
  void *value;         /* receives the value: an int, a double or a const char * */
  const char *initial; /* the value as text, if the command line has none; NULL: no text */
  double least, most;  /* the range of a number */
  const char *help;
} option;

/* Stores the value of an option. Returns false if it is not a number in the option's range. */
static inline bool option_set(const option *o, const char *text) {
  if (o->type == TEXT) {
    *(const char **)o->value = text;
    return true;
  }
  char *end;
  double number = strtod(text, &end);
  if (end == text || *end != '\0' || !(number >= o->least && number <= o->most)) return false;
  if (o->type == REAL) {
    *(double *)o->value = number;
    return true;
  }
  *(int *)o->value = (int)number;
  return (int)number == number;
}

/* Reads the command line. Returns -1, or main's exit code: 0 after --help, 2 after an error. */
static inline int options_read(const option *options, int count, int argc, char **argv) {
  for (int k = 0; k < count; k++) option_set(&options[k], options[k].initial);
  int i = 1;
  for (; i + 1 < argc; i += 2) {
    int k = 0;
    while (k < count && strcmp(argv[i], options[k].name) != 0) k++;
    if (k == count || !option_set(&options[k], argv[i + 1])) break;
  }
  if (i >= argc) return -1;

  bool help = strcmp(argv[i], "--help") == 0;
  if (!help) fprintf(stderr, "%s: no such option, or a wrong value\n", argv[i]);
  for (int k = 0; k < count; k++)
    fprintf(help ? stdout : stderr, "  %-10s  %s (%s)\n", options[k].name, options[k].help,
            options[k].initial ? options[k].initial : "none");
  return help ? 0 : 2;
}

/* Whether the command line has the option. */
static inline bool option_given(const char *name, int argc, char **argv) {
  for (int i = 1; i < argc; i += 2)
    if (strcmp(argv[i], name) == 0) return true;
  return false;
}

#endif
