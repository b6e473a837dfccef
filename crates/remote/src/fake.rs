//! To come with the first commit of code.
