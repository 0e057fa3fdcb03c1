#pragma once

// A place in rows of `columns` vectors. A thread's next vector is blockDim.x vectors on:
// `row_step` rows and `column_step` columns, blockDim.x divided by columns.
struct RowWalk {
  unsigned int row, column;

  __device__ __forceinline__ RowWalk(unsigned int vector, unsigned int columns)
      : row(vector / columns), column(vector - row * columns) {}

  __device__ __forceinline__ void next(unsigned int columns, unsigned int row_step,
                                       unsigned int column_step) {
    row += row_step;
    column += column_step;
    if (column >= columns) {
      column -= columns;
      ++row;
    }
  }
};
